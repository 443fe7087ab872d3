"""What of a schedule takes no list of its operations to tell: a search asks this of more plans than it simulates."""

from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, lru_cache

from auto3d.plan import Plan
from auto3d.schedule import build_schedule
from auto3d.schedule.in_flight import Holding, Load, holdings, in_flight
from auto3d.schedule.operation import Kind, Schedule

_PERIODS = 2  # of 2D micro-batches, after which every schedule of D devices repeats itself


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of the schedule ``name`` at these sizes; the fields are as in Schedule."""

    name: str
    options: dict[str, int | str] = field(hash=False)
    devices: int
    micro_batches: int
    stages: int
    device_of: dict[tuple[int, int], int] = field(hash=False)
    recompute: frozenset[int]
    parts: int
    in_flight: tuple[int, ...]  # per stage, see auto3d.schedule.in_flight
    holdings: tuple[Holding, ...] = field(hash=False)  # per device
    splits_backward: bool  # whether the weight half of a backward is an operation of its own

    @cached_property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """The pipeline devices of each stage: several where several pipes flow through them."""
        found: list[list[int]] = [[] for _ in range(self.stages)]
        for (stage, _), device in sorted(self.device_of.items()):
            found[stage].append(device)
        return tuple(map(tuple, found))

    def schedule(self) -> Schedule:
        """The operations themselves."""
        return _schedule(self.name, self.devices, self.micro_batches, tuple(sorted(self.options.items())))


def shape_of(plan: Plan) -> Shape:
    """Raises InputError where there is no schedule of this name, options and sizes."""
    return shape(plan.schedule, devices=plan.pp, micro_batches=plan.micro_batches, options=plan.schedule_options)


def shape(name: str, *, devices: int, micro_batches: int, options: dict[str, int | str]) -> Shape:
    return _shape(name, devices, micro_batches, tuple(sorted(options.items())))


@lru_cache(4096)
def _shape(name: str, devices: int, micro_batches: int, options: tuple[tuple[str, int | str], ...]) -> Shape:
    """From the first periods: what is in flight grows by as much in each of those that follow."""
    period = 2 * devices
    skipped = max(0, (micro_batches - _PERIODS * period - 1) // period)
    options_of = dict(options)
    listed = build_schedule(name, devices=devices, micro_batches=micro_batches - skipped * period, **options_of)
    held, loads = in_flight(listed), holdings(listed)
    if skipped:
        shorter = build_schedule(name, devices=devices, micro_batches=listed.micro_batches - period, **options_of)
        fewer = in_flight(shorter)
        held = [most + skipped * (most - before) for most, before in zip(held, fewer, strict=True)]
        loads = tuple(_grown(most, less, skipped) for most, less in zip(loads, holdings(shorter), strict=True))
    return Shape(
        name=name,
        options=options_of,
        devices=devices,
        micro_batches=micro_batches,
        stages=listed.stages,
        device_of=listed.device_of,
        recompute=listed.recompute,
        parts=listed.parts,
        in_flight=tuple(held),
        holdings=loads,
        splits_backward=any(o.kind is Kind.BACKWARD_WEIGHT for own in listed.operations for o in own),
    )


def _grown(holding: Holding, before: Holding, times: int) -> Holding:
    """``holding`` after ``times`` more periods, of which the last one made it of ``before``."""

    def grown(most: Load, less: Load) -> Load:
        counts = zip(astuple(most), astuple(less), strict=True)
        return Load(*(more + times * (more - fewer) for more, fewer in counts))

    if holding == before:
        return holding
    peaks = [tuple(map(grown, *pair)) for pair in zip(holding.peaks, before.peaks, strict=True)]
    return replace(holding, peaks=tuple(peaks))


@lru_cache(64)  # one of many micro-batches takes megabytes
def _schedule(name: str, devices: int, micro_batches: int, options: tuple[tuple[str, int | str], ...]) -> Schedule:
    return build_schedule(name, devices=devices, micro_batches=micro_batches, **dict(options))
