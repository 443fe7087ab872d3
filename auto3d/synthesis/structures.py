"""A bare problem: a model of many fine stages, which structures with fewer stages merge, on any allowed placement."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf

from auto3d.errors import InputError
from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.families.chimera import SCALES
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.options import RECOMPUTE
from auto3d.schedule.order_text import NAME
from auto3d.simulate.costs import Costs, MessageCost
from auto3d.simulate.costs_text import write_times
from auto3d.simulate.simulate import simulate
from auto3d.synthesis.bound import lower_bound
from auto3d.synthesis.problem import Problem, exceeds
from auto3d.synthesis.synthesize import TOLERANCE, Synthesis, synthesize

STRAIGHT, INTERLEAVED, V, TWO_WAY, WAVE = PLACEMENTS = ("straight", "interleaved", "v", "two-way", "wave")
FIRST_SHARE = 0.4  # share of the time in which all structures are tried
LONGER = 2  # structures that share the rest of the time


@dataclass(frozen=True, kw_only=True)
class BareProblem:
    """Times and bytes of one micro-batch on each of S fine stages, a multiple of the devices; any units.

    A structure with fewer stages merges neighbours: times and bytes add up, the message is their last stage's, and a
    stage that recomputes keeps what its first would keep. The fields are as in Problem and Costs.
    """

    devices: int
    micro_batches: int
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    recompute: tuple[float, ...]
    sync: tuple[float, ...]
    sync_copies: tuple[float, ...]  # ``sync`` where several pipes hold a stage: its copies' gradients add up
    update: tuple[float, ...]
    messages: tuple[MessageCost, ...]  # S - 1
    overlap: bool
    speed: tuple[float, ...]  # per device
    activation: tuple[float, ...]
    kept: tuple[float, ...]
    deferred: tuple[float, ...]
    weights: tuple[float, ...]  # bytes of a stage that are held all the time, on every pipe that has the stage
    memory: tuple[float, ...]  # per device, for weights and activations
    placements: frozenset[str] = frozenset(PLACEMENTS)
    may_split: bool = True
    may_recompute: bool = False

    @property
    def stages(self) -> int:
        return len(self.forward)


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Stages on devices: their problem, and the schedules by rule that have them."""

    placement: str  # one of PLACEMENTS
    problem: Problem
    seeds: tuple[Schedule, ...]

    def best_by_rule(self) -> tuple[float, Schedule] | None:
        """The makespan of the fastest of ``seeds`` that fits the memory, and the schedule; None if none fits."""
        fitting = [
            (simulate(schedule, self.problem.costs).makespan, number)
            for number, schedule in enumerate(self.seeds)
            if not any(exceeds(self.problem, schedule))
        ]
        if not fitting:
            return None
        makespan, number = min(fitting)
        return makespan, self.seeds[number]


def structures(bare: BareProblem) -> list[Structure]:
    """The structures of all schedules by rule with an allowed placement, where the weights fit.

    Raises InputError if there are none.
    """
    groups: dict[tuple, list[Schedule]] = {}
    for schedule in _schedules(bare):
        if bare.stages % schedule.stages == 0 and placement_of(schedule) in bare.placements:
            groups.setdefault(tuple(sorted(schedule.device_of.items())), []).append(schedule)
    usable = []
    for seeds in groups.values():
        problem = merged(bare, seeds[0])
        if problem is not None:
            partly = _recomputing_partly(problem, seeds) if bare.may_recompute else ()
            usable.append(Structure(placement=placement_of(seeds[0]), problem=problem, seeds=(*seeds, *partly)))
    if not usable:
        raise InputError(
            f"placements: none of {', '.join(sorted(bare.placements))} is possible with {bare.stages} stages on "
            f"{bare.devices} devices, or the weights do not fit their memory"
        )
    return usable


def _recomputing_partly(problem: Problem, seeds: Sequence[Schedule]) -> Iterator[Schedule]:
    """The ``seeds`` that may recompute and exceed the memory, with enough stages recomputed to fit it.

    On each device the first stages recompute, whose activations are held longest.
    """
    for schedule in seeds:
        partly: Schedule | None = schedule
        if not schedule.recompute and "recompute" in SCHEDULES[schedule.name].options:
            while partly is not None and any(over := exceeds(problem, partly)):
                partly = _recomputing_more(partly, over)
            if partly is not None and partly != schedule:
                yield partly


def _recomputing_more(schedule: Schedule, exceeding: Sequence[bool]) -> Schedule | None:
    """``schedule`` with one more stage recomputed on each device that ``exceeding`` marks; None if no stage is left."""
    more = set()
    for device, over in enumerate(exceeding):
        homes = [stage for (stage, _), home in schedule.device_of.items() if home == device]
        if over and not (keeping := set(homes) - schedule.recompute):
            return None
        if over:
            more.add(min(keeping))
    return replace(schedule, recompute=schedule.recompute | more)


def placement_of(schedule: Schedule) -> str:
    """How ``schedule`` has its stages on devices: one of PLACEMENTS."""
    devices, homes = schedule.devices, schedule.device_of
    if any(pipe for _, pipe in homes):
        return TWO_WAY
    order = [homes[stage, 0] for stage in range(schedule.stages)]
    if order == list(range(devices)):
        return STRAIGHT
    if order == [stage % devices for stage in range(schedule.stages)]:
        return INTERLEAVED
    return V if order == [*range(devices), *reversed(range(devices))] else WAVE


def merged(bare: BareProblem, like: Schedule) -> Problem | None:
    """``bare`` with the stages and the devices of ``like``; None if the weights do not fit the memory of a device."""
    free = [has - held for has, held in zip(bare.memory, weights_on(bare, like), strict=True)]
    if min(free) < 0:
        return None
    stages = frozenset(range(like.stages))
    return Problem(
        micro_batches=bare.micro_batches,
        costs=merged_costs(bare, like),
        device_of=like.device_of,
        activation=_totals(bare.activation, like.stages),
        kept=bare.kept[:: bare.stages // like.stages],
        deferred=_totals(bare.deferred, like.stages),
        free=tuple(free),
        may_split=stages if bare.may_split else frozenset(),
        may_recompute=stages if bare.may_recompute else frozenset(),
    )


def merged_costs(bare: BareProblem, like: Schedule) -> Costs:
    """The times of ``bare`` with the stages of ``like``."""
    inputs, weights = _totals(bare.backward_input, like.stages), _totals(bare.backward_weight, like.stages)
    count = bare.stages // like.stages
    return Costs(
        forward=_totals(bare.forward, like.stages),
        backward=tuple(map(sum, zip(inputs, weights, strict=True))),
        backward_input=inputs,
        backward_weight=weights,
        recompute=_totals(bare.recompute, like.stages),
        sync=_totals(bare.sync_copies if any(pipe for _, pipe in like.device_of) else bare.sync, like.stages),
        update=_totals(bare.update, like.stages),
        messages=bare.messages[count - 1 :: count],
        speed=bare.speed,
        overlap=bare.overlap,
    )


def _totals(values: Sequence[float], stages: int) -> tuple[float, ...]:
    """The sums of ``values`` over the neighbours that each of ``stages`` stages merges."""
    count = len(values) // stages
    return tuple(sum(values[first : first + count]) for first in range(0, len(values), count))


def weights_on(bare: BareProblem, like: Schedule) -> list[float]:
    """The weights on each device with the stages and the devices of ``like``."""
    count = bare.stages // like.stages
    held = [0.0] * bare.devices
    for (stage, _), device in like.device_of.items():
        held[device] += sum(bare.weights[count * stage : count * (stage + 1)])
    return held


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The shortest order of a bare problem on any of its structures."""

    structure: Structure
    synthesis: Synthesis
    by_rule: tuple[float, Schedule] | None  # makespan of the best schedule by rule on any structure; None: none fits


def solve(
    allowed: Sequence[Structure],
    *,
    seconds: float,
    seed: int = 0,
    tell: Callable[[Structure, float], None] = lambda structure, least: None,
) -> Solution:
    """The shortest order on any of ``allowed``, sought for ``seconds`` of processor time in all.

    Each structure gets some of the time; the best structures then share the rest, but structures whose lower bound is
    above the best order so far. ``tell`` is called with each structure before its search, and with the least makespan
    so far. Raises InputError if no order fits.
    """
    bounds: dict[int, float] = {}
    solved: dict[int, Synthesis] = {}
    least = inf
    refusal: InputError | None = None
    for number, structure in enumerate(allowed):
        tell(structure, least)
        try:
            bounds[number] = lower_bound(structure.problem).time
            solved[number] = synthesize(
                structure.problem, seconds=FIRST_SHARE * seconds / len(allowed), seeds=structure.seeds, seed=seed
            )
        except InputError as error:
            refusal = error
        else:
            least = min(least, solved[number].makespan)
    if not solved:
        assert refusal is not None
        raise refusal
    open_numbers = [number for number in solved if bounds[number] * (1 + TOLERANCE) < least]
    for number in sorted(open_numbers, key=lambda number: solved[number].makespan)[:LONGER]:
        first = solved[number]
        tell(allowed[number], min(synthesis.makespan for synthesis in solved.values()))
        again = synthesize(
            allowed[number].problem,
            seconds=(1 - FIRST_SHARE) * seconds / min(LONGER, len(open_numbers)),
            seeds=[*allowed[number].seeds, first.schedule],
            seed=seed,
        )
        if again.makespan < first.makespan:
            solved[number] = replace(
                again, begun_from=first.begun_from if again.begun_from == NAME else again.begun_from
            )
    best = min(solved, key=lambda number: solved[number].makespan)
    by_rule = [rule for tried in allowed if (rule := tried.best_by_rule()) is not None]
    return Solution(
        structure=allowed[best],
        synthesis=solved[best],
        by_rule=min(by_rule, key=lambda pair: pair[0], default=None),
    )


def _schedules(bare: BareProblem) -> Iterator[Schedule]:
    """The schedules that ``auto`` tries, at the sizes of ``bare``, with all their options, fitted to its times."""
    sizes = {"devices": bare.devices, "micro_batches": bare.micro_batches}
    for name, family in SCHEDULES.items():
        if not family.automatic:
            continue
        values = {option: some for option, some in _values(bare).items() if option in family.options}
        for combination in product(*values.values()):
            options = dict(zip(values, combination, strict=True))
            try:
                schedule = build_schedule(name, **sizes, **options)
                if bare.stages % schedule.stages:
                    continue
                if "times" in family.options:
                    times = write_times(merged_costs(bare, schedule))
                    schedule = build_schedule(name, **sizes, **options, times=times)
            except InputError:  # it does not exist at these sizes
                continue
            operations = {
                (o.kind is Kind.BACKWARD_WEIGHT, o.stage, o.pipe)
                for row in schedule.operations
                for o in row
                if o.micro_batches
            }
            splits = any(half for half, _, _ in operations)
            used = {(stage, pipe) for _, stage, pipe in operations} == set(schedule.device_of)
            # Chimera may leave a pipe without micro-batches, which an order cannot express.
            if used and (bare.may_split or not splits) and (bare.may_recompute or not schedule.recompute):
                yield schedule


def _values(bare: BareProblem) -> dict[str, Sequence[int | str]]:
    """The values to try of each option of schedules by rule."""
    devices, per_device = bare.devices, bare.stages // bare.devices
    deferred = max(
        (part / whole for part, whole in zip(bare.deferred, bare.activation, strict=True) if whole), default=1
    )
    return {
        "chunks": range(2, per_device + 1),
        "group": sorted({0, *(size for size in (2 * devices, bare.micro_batches) if size <= bare.micro_batches)}),
        "waves": range(1, per_device // 2 + 1),
        "pipes": [count for count in range(2, devices + 1, 2) if devices % count == 0],
        "scale": SCALES[:2],
        "deferred": sorted({max(1, ceil(100 * deferred)), 100}),
        "recompute": RECOMPUTE if bare.may_recompute else RECOMPUTE[:1],
    }
