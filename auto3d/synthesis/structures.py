"""A bare problem: a model of many fine stages, which structures with fewer stages merge, on any allowed placement."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from auto3d.errors import InputError
from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.operation import Schedule
from auto3d.schedule.order_text import order_options
from auto3d.simulate.costs import Costs, MessageCost
from auto3d.simulate.simulate import simulate
from auto3d.synthesis.problem import Problem, peaks
from auto3d.synthesis.synthesize import Synthesis, synthesize

STRAIGHT, INTERLEAVED, V, TWO_WAY, WAVE = PLACEMENTS = ("straight", "interleaved", "v", "two-way", "wave")


@dataclass(frozen=True, kw_only=True)
class BareProblem:
    """Times and bytes of one micro-batch on each of S fine stages, a multiple of the devices; any units.

    A structure with fewer stages merges neighbours: times and bytes add up, a message is that of their last, and a
    stage that recomputes keeps what its first would keep. The fields are those of Problem and Costs.
    """

    devices: int
    micro_batches: int
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    recompute: tuple[float, ...]
    sync: tuple[float, ...]
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
            if all(
                held <= free * (1 + 1e-9)
                for held, free in zip(peaks(self.problem, schedule), self.problem.free, strict=True)
            )
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
    found = []
    for seeds in groups.values():
        problem = merged(bare, seeds[0])
        if problem is not None:
            found.append(Structure(placement=placement_of(seeds[0]), problem=problem, seeds=tuple(seeds)))
    if not found:
        raise InputError(
            f"placements: none of {', '.join(sorted(bare.placements))} is possible with {bare.stages} stages on "
            f"{bare.devices} devices, or the weights do not fit their memory"
        )
    return found


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
    count = bare.stages // like.stages
    firsts = range(0, bare.stages, count)

    def total(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(sum(values[first : first + count]) for first in firsts)

    free = [has - held for has, held in zip(bare.memory, weights_on(bare, like), strict=True)]
    if min(free) < 0:
        return None
    stages = frozenset(range(like.stages))
    return Problem(
        micro_batches=bare.micro_batches,
        costs=Costs(
            forward=total(bare.forward),
            backward=tuple(map(sum, zip(total(bare.backward_input), total(bare.backward_weight), strict=True))),
            backward_input=total(bare.backward_input),
            backward_weight=total(bare.backward_weight),
            recompute=total(bare.recompute),
            sync=total(bare.sync),
            update=total(bare.update),
            messages=tuple(bare.messages[first - 1] for first in firsts[1:]),
            speed=bare.speed,
            overlap=bare.overlap,
        ),
        device_of=like.device_of,
        activation=total(bare.activation),
        kept=tuple(bare.kept[first] for first in firsts),
        deferred=total(bare.deferred),
        free=tuple(free),
        may_split=stages if bare.may_split else frozenset(),
        may_recompute=stages if bare.may_recompute else frozenset(),
    )


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


def solve(found: Sequence[Structure], *, seconds: float, seed: int = 0) -> Solution:
    """The shortest order on any of ``found``, sought for ``seconds`` in all. Raises InputError if none fits."""
    solved: list[tuple[Synthesis, Structure]] = []
    refusal: InputError | None = None
    for structure in found:
        share = seconds / len(found)
        try:
            result = synthesize(structure.problem, seconds=share, seeds=structure.seeds, seed=seed)
        except InputError as error:
            refusal = error
            continue
        solved.append((result, structure))
    if not solved:
        assert refusal is not None
        raise refusal
    synthesis, structure = min(solved, key=lambda each: each[0].makespan)
    by_rule = [best for each in found if (best := each.best_by_rule()) is not None]
    return Solution(
        structure=structure, synthesis=synthesis, by_rule=min(by_rule, key=lambda each: each[0], default=None)
    )


def _schedules(bare: BareProblem) -> Iterator[Schedule]:
    """The synchronous schedules by rule at the sizes of ``bare``, with every number of chunks."""
    per_device = bare.stages // bare.devices
    for name, family in SCHEDULES.items():
        if family.asynchronous or family.explicit:
            continue
        chunks = [{"chunks": count} for count in range(2, per_device + 1)] if "chunks" in family.options else [{}]
        recompute = [{"recompute": "full"}] if bare.may_recompute and "recompute" in family.options else []
        for options in [one | other for one in chunks for other in ({}, *recompute)]:
            try:
                schedule = build_schedule(name, devices=bare.devices, micro_batches=bare.micro_batches, **options)
                order_options(schedule)
            except InputError:  # it does not exist at these sizes, or an order cannot hold it
                continue
            splits = any(operation.kind == "W" for row in schedule.operations for operation in row)
            if (bare.may_split or not splits) and (bare.may_recompute or not schedule.recompute):
                yield schedule
