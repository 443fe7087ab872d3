"""What a pipeline device holds at each operation of its schedule, counted without times: micro-batches and messages.

Messages are those between neighbouring stages, as ``auto3d.schedule.lowering`` posts and releases them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

from auto3d.capture.graph import Value
from auto3d.partition.stage import Transfer
from auto3d.schedule.lowering import lower
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.program import Message, Program
from auto3d.schedule.shape import Shape


@dataclass(slots=True)
class Held:
    """Counts of what a device holds of one stage. Micro-batches are parts of them where a schedule divides them."""

    in_flight: int = 0  # from the forward until the backward, or until its input half
    recomputed: int = 0  # number of those in flight with recomputed activations
    deferred: int = 0  # from the input half of the backward until the weight half
    gradients: int = 0  # 1 once a backward of the iteration has made the gradients of weights
    older: int = 0  # older versions of the weights
    posted: int = 0  # activations whose receive is posted, for later forwards
    posted_gradients: int = 0
    sent: int = 0  # activations that are sent and not released
    sent_gradients: int = 0


COUNTS = tuple(Held.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """An operation of a device, and what the device holds while it runs, without the operation's own messages."""

    operation: Operation
    recomputed: bool = False  # whether its activations have been recomputed before
    makes_gradients: bool = False  # whether it is the stage's first backward of the iteration
    summing: bool = False  # whether sums of gradients are under way
    counts: tuple[tuple[int, ...], ...] = ()  # per stage of the device: the fields of Held

    @property
    def key(self) -> tuple[Kind, int, bool, bool, bool]:
        return (
            self.operation.kind, self.operation.stage, self.recomputed, self.makes_gradients, self.summing,
        )  # fmt: skip


def stages_of(schedule: Schedule | Shape, device: int) -> tuple[int, ...]:
    """The stages of ``device`` in order, each once, even if it stands on several pipes."""
    return tuple(sorted({stage for (stage, _), home in schedule.device_of.items() if home == device}))


@lru_cache(1024)  # shapes are few, and each is asked for by many plans
def highest_moments(shape: Shape) -> tuple[tuple[Moment, ...], ...]:
    """Per device, the moments that no other moment with the same key reaches or exceeds in every count."""
    listed, skipped = shape.first_periods()
    highest = _highest(listed)
    if not skipped:
        return highest
    before = _highest(shape.first_periods(fewer=1)[0])
    if [[one.key for one in here] for here in highest] != [[one.key for one in here] for here in before]:
        return _highest(shape.schedule())
    return tuple(
        tuple(_grown(one, earlier, skipped) for one, earlier in zip(*both, strict=True))
        for both in zip(highest, before, strict=True)
    )


def _grown(moment: Moment, before: Moment, times: int) -> Moment:
    """``moment`` after ``times`` more periods; ``before`` is the same moment one period earlier."""
    pairs = zip(moment.counts, before.counts, strict=True)
    counts = tuple(tuple(now + times * (now - then) for now, then in zip(*pair, strict=True)) for pair in pairs)
    return replace(moment, operation=replace(moment.operation, micro_batches=()), counts=counts)


def _highest(schedule: Schedule) -> tuple[tuple[Moment, ...], ...]:
    return tuple(_not_exceeded(list(each)) for each in all_moments(schedule))


def _not_exceeded(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    groups: dict[tuple, dict[tuple[int, ...], Moment]] = {}
    for moment in moments:
        flat = tuple(count for counts in moment.counts for count in counts)
        groups.setdefault(moment.key, {}).setdefault(flat, moment)
    kept: list[Moment] = []
    for key in sorted(groups):
        highest: list[tuple[int, ...]] = []
        for flat in sorted(groups[key], reverse=True):  # a moment comes after those that exceed it
            if not any(all(a <= b for a, b in zip(flat, other, strict=True)) for other in highest):
                highest.append(flat)
        kept += [groups[key][flat] for flat in reversed(highest)]
    return tuple(kept)


def all_moments(schedule: Schedule) -> list[list[Moment]]:
    """Per device, one moment for each of its operations, in order."""
    return [list(_moments(schedule, device, program)) for device, program in enumerate(_programs(schedule))]


def _programs(schedule: Schedule) -> tuple[Program, ...]:
    value = Value("", (), "float32", 4, True)
    neighbours = [Transfer(value=value, source=stage - 1, target=stage) for stage in range(1, schedule.stages)]
    return lower(schedule, neighbours)


def _moments(schedule: Schedule, device: int, program: Program) -> Iterator[Moment]:
    stages = stages_of(schedule, device)
    held = {stage: Held() for stage in stages}
    early: set[tuple[int, int, int]] = set()  # (stage, pipe, micro-batch) recomputed by an R before the backward
    older = _older_versions(schedule, device)
    splits = {step.operation.stage for step in program.steps if step.operation.kind is Kind.BACKWARD_WEIGHT}
    summing = False
    for index, step in enumerate(program.steps):
        operation, count = step.operation, len(step.operation.micro_batches)
        here, kind = held[operation.stage], step.operation.kind
        for message in step.posts:
            _count(held[message.target], message, "posted", 1)
        for message in step.releases:
            _count(held[message.source], message, "sent", -1)
        for message in step.receives:
            if schedule.device_of[message.source, message.pipe] == device:
                _count(held[message.source], message, "sent", -1)
            else:
                _count(held[message.target], message, "posted", -1)
        keys = {(operation.stage, operation.pipe, micro_batch) for micro_batch in operation.micro_batches}
        recomputed = kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and keys <= early
        for stage in stages:
            held[stage].older = older[stage][index]
        if kind is Kind.FORWARD:
            here.in_flight += count
        elif kind is Kind.RECOMPUTE:
            here.recomputed += count
            early |= keys
        elif kind is Kind.SYNC:
            summing = True
        makes = not here.gradients and kind is (Kind.BACKWARD_WEIGHT if operation.stage in splits else Kind.BACKWARD)
        yield Moment(
            operation=operation,
            recomputed=recomputed,
            makes_gradients=makes,
            summing=summing,
            counts=tuple(astuple(held[stage]) for stage in stages),
        )
        here.gradients |= makes
        if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            here.in_flight -= count
            here.recomputed -= count if recomputed else 0
            here.deferred += count if kind is Kind.BACKWARD_INPUT and operation.stage in splits else 0
        elif kind is Kind.BACKWARD_WEIGHT:
            here.deferred -= count
        for message in step.sends:
            _count(here, message, "sent", 1)


def _count(held: Held, message: Message, what: str, change: int) -> None:
    name = what if message.kind is Kind.FORWARD else f"{what}_gradients"
    setattr(held, name, getattr(held, name) + change)


def _older_versions(schedule: Schedule, device: int) -> dict[int, list[int]]:
    """Stage -> for each operation of ``device``, the number of old versions of its weights that it keeps."""
    operations = schedule.operations[device]
    older = {stage: [0] * len(operations) for stage in stages_of(schedule, device)}
    for (stage, pipe), home in schedule.device_of.items() if schedule.weight_version else ():
        if home != device:
            continue
        mine = [(o.stage, o.pipe) == (stage, pipe) for o in operations]
        last_use: dict[int, int] = {}
        for index, operation in enumerate(operations):
            if mine[index]:
                last_use.update((schedule.weight_version[stage, m], index) for m in operation.micro_batches)
        newest, alive = 0, {0}
        for index, operation in enumerate(operations):
            if mine[index] and operation.kind is Kind.UPDATE:
                newest += 1
                alive.add(newest)
            alive = {version for version in alive if version == newest or last_use.get(version, -1) >= index}
            older[stage][index] += len(alive) - 1
    return older
