"""Schedule properties that do not need the whole list of operations.

A search reads them of many more plans than it simulates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from auto3d.plan import Plan
from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.in_flight import in_flight
from auto3d.schedule.operation import BACKWARDS, Kind, Operation, Schedule
from auto3d.schedule.options import RECOMPUTE, SYNC, recomputing
from auto3d.share import Share, share_of

PERIODS = 2  # every periodic schedule repeats itself after this many periods

_FORWARD, _WEIGHT_HALF = Kind.FORWARD, Kind.BACKWARD_WEIGHT

Listing = tuple[str, int, int, tuple[tuple[str, int | str], ...]]
"""Name of a schedule, pipeline devices, micro-batches, and options."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The properties of the schedule ``name`` at these sizes. Fields with a name of Schedule's have its meaning."""

    name: str
    options: dict[str, int | str] = field(hash=False)
    devices: int
    micro_batches: int
    stages: int
    device_of: dict[tuple[int, int], int] = field(hash=False)
    recompute: frozenset[int]
    parts: int
    slices: int
    in_flight: tuple[int, ...]  # per stage: the micro-batches in flight at the peak, see auto3d.schedule.in_flight
    grows: bool  # whether more micro-batches are in flight the more an iteration has
    asynchronous: bool  # whether micro-batches see older versions of the weights
    split: frozenset[int]  # stages on which the weight half of some backward is an operation of its own
    alternates: bool  # whether some device runs a forward after a backward

    @property
    def sample_parts(self) -> int:
        """The parts into which the samples of a micro-batch are divided."""
        return self.parts // self.slices

    @cached_property
    def pipes(self) -> int:
        return 1 + max(pipe for _, pipe in self.device_of)

    @cached_property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, its pipeline devices: one for each pipe."""
        homes: list[list[int]] = [[] for _ in range(self.stages)]
        for (stage, _), device in sorted(self.device_of.items()):
            homes[stage].append(device)
        return tuple(tuple(devices) for devices in homes)

    def first_periods(self, *, fewer: int = 0) -> tuple[Listing, int]:
        """The listing of as many micro-batches as it takes to repeat itself, and the number of periods left out.

        ``fewer`` leaves out that many more.
        """
        period = _period(self.devices, self.options)
        skipped = _skipped(self.name, period, self.micro_batches) + fewer
        name, devices, micro_batches, options = self.listing
        return (name, devices, micro_batches - skipped * period, options), skipped

    @property
    def listing(self) -> Listing:
        """What decides the operations of the schedule."""
        return self.name, self.devices, self.micro_batches, tuple(sorted(self.options.items()))

    def schedule(self) -> Schedule:
        """The schedule itself, with all its operations."""
        return listed(self.listing)


def shape_of(plan: Plan) -> Shape:
    """The shape of the schedule of ``plan``. Raises InputError if the name, an option or a size is invalid."""
    return shape(plan.schedule, devices=plan.pp, micro_batches=plan.micro_batches, options=plan.schedule_options)


def shape(name: str, *, devices: int, micro_batches: int, options: dict[str, int | str]) -> Shape:
    """The shape of the schedule ``name`` at these sizes. Raises InputError if name, option or size is invalid."""
    return _shape(name, devices, micro_batches, tuple(sorted(options.items())))


def _period(devices: int, options: Mapping[str, int | str]) -> int:
    """The micro-batches of one period: 2D, or two groups if an interleaved schedule has larger groups than D."""
    group = options.get("group", 0)
    assert isinstance(group, int), f"build_schedule refuses the group {group!r}"
    return 2 * max(devices, group)


def _skipped(name: str, period: int, micro_batches: int) -> int:
    """The number of periods after the first periods, which determine the rest."""
    if name in SCHEDULES and not SCHEDULES[name].periodic:
        return 0
    return max(0, (micro_batches - PERIODS * period - 1) // period)


@lru_cache(4096)
def _shape(name: str, devices: int, micro_batches: int, options: tuple[tuple[str, int | str], ...]) -> Shape:
    """Counts the first periods; in each later period, the numbers in flight grow by the same amount."""
    options_of = dict(options)
    sync, recompute = options_of.get("sync"), options_of.get("recompute")
    known = name in SCHEDULES and not SCHEDULES[name].explicit and options_of.keys() <= SCHEDULES[name].options.keys()
    if known and (sync in SYNC[1:] or recompute in RECOMPUTE[1:]):  # no operation that is counted depends on them
        counted = tuple((option, value) for option, value in options if option not in ("sync", "recompute"))
        plain = _shape(name, devices, micro_batches, counted)
        again = plain.recompute if recompute is None else recomputing(name, plain.stages, str(recompute))
        return replace(plain, options=options_of, recompute=again)
    period = _period(devices, options_of)
    skipped = _skipped(name, period, micro_batches)
    listed = build_schedule(name, devices=devices, micro_batches=micro_batches - skipped * period, **options_of)
    held, grows = in_flight(listed), False
    if skipped:
        shorter = build_schedule(name, devices=devices, micro_batches=listed.micro_batches - period, **options_of)
        held_before = in_flight(shorter)
        grows = held != held_before
        held = [count + skipped * (count - before) for count, before in zip(held, held_before, strict=True)]
    return Shape(
        name=name,
        options=options_of,
        devices=devices,
        micro_batches=micro_batches,
        stages=listed.stages,
        device_of=listed.device_of,
        recompute=listed.recompute,
        parts=listed.parts,
        slices=listed.slices,
        in_flight=tuple(held),
        grows=grows,
        asynchronous=bool(listed.weight_version),
        split=frozenset(o.stage for operations in listed.operations for o in operations if o.kind is _WEIGHT_HALF),
        alternates=any(map(_alternates, listed.operations)),
    )


def _alternates(operations: Sequence[Operation]) -> bool:
    """Whether a forward follows a backward."""
    begun = False
    for operation in operations:
        if operation.kind is _FORWARD and begun:
            return True
        begun = begun or operation.kind in BACKWARDS
    return False


def without_recompute(listing: Listing) -> Listing:
    """A listing with the same operations, and the same for all values of the option to recompute.

    Where that is an option of a schedule by rule, a recomputation is inside its backward.
    """
    name, devices, micro_batches, options = listing
    if SCHEDULES[name].explicit:
        return listing
    return name, devices, micro_batches, tuple(option for option in options if option[0] != "recompute")


@lru_cache(8)  # small, since a schedule of many micro-batches takes megabytes
def listed(listing: Listing) -> Schedule:
    """The schedule of ``listing``, with all its operations."""
    name, devices, micro_batches, options = listing
    return build_schedule(name, devices=devices, micro_batches=micro_batches, **dict(options))


def has_one_reader(plan: Plan, schedule: Schedule | Shape) -> bool:
    """Whether one rank of each pipeline of ``plan`` can read for all of its stages: it alone has stage 0, and has whole
    micro-batches."""
    readers = {device for (stage, _), device in schedule.device_of.items() if stage == 0}
    return len(readers) == 1 and plan.tp == max(stage.replicas for stage in plan.stages) == schedule.slices == 1


def shares_of(plan: Plan) -> tuple[Share, ...]:
    """The shares of the operations that run a micro-batch on one rank of ``plan``: one for each slice, in order."""
    slices = shape_of(plan).slices
    if slices == 1:
        return (share_of(plan),)
    return tuple(replace(share_of(plan), slices=slices, slice_number=number) for number in range(slices))
