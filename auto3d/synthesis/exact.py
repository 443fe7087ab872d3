"""The optimum of a small problem: a constraint model of its orders, solved by OR-tools CP-SAT.

Micro-batches of a pipe are identical, so some optimal order runs every kind of operation of a stage in their ascending
order. Proof by exchange: in any order, give the n-th F of each stage the n-th micro-batch, and likewise the n-th
backward and W. Each operation keeps its time, and all that it needs is there: when the n-th F of a stage begins, the
messages of n forwards of the stage before have arrived, hence the messages of the first n; the same holds for
gradients, for the own forward of a backward and for the I of a W. An R goes to the first later backward that has none
yet. At each moment every stage holds as many micro-batches in each state as before, so the memory stays the same.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, pairwise
from math import floor, inf, lcm
from typing import Any

from auto3d.errors import InputError
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.order_text import NAME
from auto3d.schedule.sync import place_syncs
from auto3d.simulate.simulate import simulate
from auto3d.synthesis.pipe_stage import PipeStage, pipe_stages
from auto3d.synthesis.problem import Problem

FINEST = 10**9  # the longest horizon, in units, at which times stay exact
ROUNDED = 10**7  # the horizon in units if they do not
WORKERS = 8  # CP-SAT's portfolio: each worker searches in another way
TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best order of a problem within a solver's time, and what no order can be shorter than."""

    schedule: Schedule | None  # with its syncs and updates; None if the time was over before there was an order
    time: float  # makespan of ``schedule`` as simulated; infinite without a schedule
    lower_bound: float

    @property
    def proven(self) -> bool:
        """Whether no order is shorter than ``schedule``."""
        return self.time <= self.lower_bound * (1 + TOLERANCE)


def optimum(problem: Problem, *, seconds: float) -> Optimum:
    """The shortest order of ``problem``, or the best order and the best lower bound after ``seconds``.

    Times become whole numbers of a common unit. If there is none, times and bytes are rounded down: the lower bound
    stays valid, but it can be up to about 1e-5 below the optimum, which is then not proven. Raises InputError if no
    order fits the memory.
    """
    from ortools.sat.python import cp_model  # slow to import

    orders = _Orders(problem)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = WORKERS
    solver.parameters.cut_level = 0  # with cuts, OR-tools 9.15 aborts on some problems: "Check failed: threshold > 0"
    solver.parameters.catch_sigint_signal = False  # an interrupt ends the command, not only the solver
    status = solver.solve(orders.model)
    if status == cp_model.INFEASIBLE:
        raise InputError("problem: no order fits the memory of its devices; free more of it or recompute more stages")
    lower_bound = solver.best_objective_bound / orders.scale
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Optimum(schedule=None, time=inf, lower_bound=max(0.0, lower_bound))
    schedule = orders.schedule(solver)
    return Optimum(schedule=schedule, time=simulate(schedule, problem.costs).makespan, lower_bound=lower_bound)


def scale_of(values: list[float], *, most: float) -> Fraction:
    """The factor that makes ``values`` whole numbers; if ``most`` then exceeds FINEST, the factor makes it ROUNDED.

    A value counts as the shortest decimal that denotes it: 0.1 is a tenth.
    """
    factor = lcm(*(Fraction(repr(float(value))).denominator for value in values)) if values else 1
    return Fraction(factor) if most * factor <= FINEST else Fraction(ROUNDED) / Fraction(most)


def whole(value: float, scale: Fraction) -> int:
    """``value`` in units, rounded down."""
    return floor(Fraction(repr(float(value))) * scale)


@dataclass(frozen=True)
class _PlaceSteps:
    """The variables of one pipe stage: one entry per micro-batch of its pipe."""

    forward: list[tuple[Any, Any]]  # (start, end)
    gradient: list[tuple[Any, Any]]  # B or I
    weight: list[tuple[Any, Any]]  # empty unless the stage may split
    recompute: list[tuple[Any, Any, Any]]  # (start, end, present); empty unless the stage may recompute


class _Orders:
    """The model of all orders of a problem, with the makespan to minimise."""

    def __init__(self, problem: Problem) -> None:
        from ortools.sat.python import cp_model

        self.problem = problem
        self.model = cp_model.CpModel()
        self.places = pipe_stages(problem)
        costs = problem.costs
        times = [
            time
            for place in self.places
            for time in (place.forward, place.backward, place.backward_input, place.backward_weight, place.recompute,
                         place.send_forward, place.send_gradient)
        ]  # fmt: skip
        ends = [*costs.sync, *(u / costs.speed[p.device] for p in self.places for u in [costs.update[p.stage]])]
        # All operations and messages one after another, twice where messages occupy sender and receiver.
        most = sum(ends) + sum(
            p.micro_batches * (p.forward + max(p.backward, p.backward_input + p.backward_weight) + p.recompute)
            + 2 * p.micro_batches * (p.send_forward + p.send_gradient)
            for p in self.places
        )
        self.scale = scale_of([*times, *ends], most=max(most, TOLERANCE))
        self.horizon = whole(most, self.scale) + 1
        self.splits = {stage: self.model.new_bool_var("") for stage in problem.may_split}
        self.recomputes = {stage: self.model.new_bool_var("") for stage in problem.may_recompute}
        self.busy: list[list[Any]] = [[] for _ in range(problem.devices)]  # intervals of each device
        self.held: list[list[tuple[Any, float]]] = [[] for _ in range(problem.devices)]  # (interval, bytes)
        self.steps = {(p.stage, p.pipe): self._steps(p) for p in self.places}
        self._connect()
        for device, intervals in enumerate(self.busy):
            self.model.add_no_overlap(intervals)
            self._limit_memory(device)
        self.model.minimize(self._makespan())

    def units(self, time: float) -> int:
        return whole(time, self.scale)

    def _time(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def _interval(self, device: int, size: Any, present: Any = None) -> tuple[Any, Any]:
        """(start, end) of an operation on ``device``; without overlap, its messages are parts of it."""
        start, end = self._time(), self._time()
        if present is None:
            self.busy[device].append(self.model.new_interval_var(start, size, end, ""))
        else:
            self.busy[device].append(self.model.new_optional_interval_var(start, size, end, present, ""))
        return start, end

    def _steps(self, place: PipeStage) -> _PlaceSteps:
        model, stage, device = self.model, place.stage, place.device
        split, recomputes = self.splits.get(stage), self.recomputes.get(stage)
        overlap = self.problem.costs.overlap
        around_forward = 0 if overlap else self.units(place.receive_forward) + self.units(place.send_forward)
        around_gradient = 0 if overlap else self.units(place.receive_gradient) + self.units(place.send_gradient)
        steps = _PlaceSteps([], [], [], [])
        numbers = range(place.micro_batches)
        for _ in numbers:
            forward = self._interval(device, self.units(place.forward) + around_forward)
            size: Any = self.units(place.backward) + around_gradient
            if split is not None:
                size += (self.units(place.backward_input) - self.units(place.backward)) * split
            inside = None
            if recomputes is not None:
                inside, separate = model.new_bool_var(""), model.new_bool_var("")
                model.add(inside + separate == recomputes)
                size += self.units(place.recompute) * inside
            size_variable = self._time()
            model.add(size_variable == size)
            gradient = self._interval(device, size_variable)
            model.add(gradient[0] >= forward[1])
            steps.forward.append(forward)
            steps.gradient.append(gradient)
            if recomputes is not None:
                start, end = self._interval(device, self.units(place.recompute), separate)
                model.add(start >= forward[1]).only_enforce_if(separate)
                model.add(end <= gradient[0]).only_enforce_if(separate)
                steps.recompute.append((start, end, separate))
            self._hold(place, forward, gradient, steps.recompute[-1] if recomputes is not None else None)
            if split is not None:
                weight = self._interval(device, self.units(place.backward_weight), split)
                model.add(weight[0] >= gradient[1]).only_enforce_if(split)
                steps.weight.append(weight)
                deferred = model.new_optional_interval_var(gradient[1], self._time(), weight[1], split, "")
                self.held[device].append((deferred, self.problem.deferred[stage]))
        for series in (steps.forward, steps.gradient):
            for earlier, later in pairwise(series):
                model.add(earlier[1] <= later[0])
        for earlier, later in pairwise(steps.weight):
            model.add(earlier[1] <= later[0]).only_enforce_if(split)
        return steps

    def _hold(self, place: PipeStage, forward: Any, gradient: Any, recompute: Any) -> None:
        """The activations of one micro-batch: ``kept`` from its F, the rest from its F or its recomputation."""
        problem, stage = self.problem, place.stage
        held, size = self.held[place.device], self._time()
        lifetime = self.model.new_interval_var(forward[0], size, gradient[1], "")
        if recompute is None:
            held.append((lifetime, problem.activation[stage]))
            return
        held.append((lifetime, problem.kept[stage]))
        begin, (start, _, separate), recomputes = self._time(), recompute, self.recomputes[stage]
        self.model.add(begin == forward[0]).only_enforce_if(~recomputes)
        self.model.add(begin == start).only_enforce_if(separate)
        self.model.add(begin == gradient[0]).only_enforce_if(recomputes, ~separate)
        rest = self.model.new_interval_var(begin, self._time(), gradient[1], "")
        held.append((rest, problem.activation[stage] - problem.kept[stage]))

    def _connect(self) -> None:
        """Messages: each queues on its link in the order of sending or, without overlap, lies in its operations."""
        links: dict[tuple[int, int], list[list[tuple[Any, Any, Any]]]] = {}  # per pipe stage and kind: (op, leave, end)
        for place in self.places:
            stage, pipe, steps = place.stage, place.pipe, self.steps[place.stage, place.pipe]
            for ours, other, kind, time in (
                (steps.forward, stage + 1, "forward", place.send_forward),
                (steps.gradient, stage - 1, "gradient", place.send_gradient),
            ):
                if (other, pipe) not in self.steps:
                    continue
                receivers = getattr(self.steps[other, pipe], kind)
                duration = self.units(time)
                if not self.problem.costs.overlap or not duration:
                    # Without overlap, the receiver's part of the message begins when the sender's does.
                    sent = 0 if self.problem.costs.overlap else duration
                    for (_, end), (start, _) in zip(ours, receivers, strict=True):
                        self.model.add(start >= end - sent)
                    continue
                queue = []
                for operation, (start, _) in zip(ours, receivers, strict=True):
                    leave = self._time()
                    self.model.add(leave >= operation[1])
                    self.model.add(start >= leave + duration)
                    queue.append((operation, leave, leave + duration))
                links.setdefault((place.device, self.problem.device_of[other, pipe]), []).append(queue)
        for queues in links.values():
            for queue in queues:
                for earlier, later in pairwise(queue):
                    self.model.add(earlier[2] <= later[1])
            for queue, another in combinations(queues, 2):
                for message in queue:
                    for rival in another:
                        first = self.model.new_bool_var("")
                        self.model.add(message[0][1] <= rival[0][0]).only_enforce_if(first)
                        self.model.add(message[2] <= rival[1]).only_enforce_if(first)
                        self.model.add(rival[0][1] <= message[0][0]).only_enforce_if(~first)
                        self.model.add(rival[2] <= message[1]).only_enforce_if(~first)

    def _limit_memory(self, device: int) -> None:
        free = self.problem.free[device]
        if free == inf:
            return
        sizes = [size for _, size in self.held[device]]
        scale = scale_of([free, *sizes], most=max(free, *sizes, TOLERANCE))
        self.model.add_cumulative(
            [interval for interval, _ in self.held[device]], [whole(size, scale) for size in sizes], whole(free, scale)
        )

    def _makespan(self) -> Any:
        """Per device: its last operation, its syncs one after another, syncs of its stages elsewhere, its updates."""
        model, costs = self.model, self.problem.costs
        on: list[list[PipeStage]] = [[p for p in self.places if p.device == d] for d in range(self.problem.devices)]
        last, synced = [], []
        for places in on:
            end = self._time()
            for place in places:
                steps = self.steps[place.stage, place.pipe]
                for _, other in steps.gradient[-1:] + steps.weight[-1:]:
                    model.add(end >= other)
            last.append(end)
            synced.append(self._synced(places, end))
        makespan = self._time()
        for places, end in zip(on, last, strict=True):
            stages = {place.stage for place in places}
            updates = sum(self.units(costs.update[p.stage] / costs.speed[p.device]) for p in places)
            model.add(makespan >= end + sum(self.units(costs.sync[stage]) for stage in stages) + updates)
            for other in synced:
                for stage in stages & set(other):
                    model.add(makespan >= other[stage] + updates)
        return makespan

    def _synced(self, places: list[PipeStage], end: Any) -> dict[int, Any]:
        """Stage -> when its all-reduce has ended, if other devices hold it too.

        Lazy syncs run in the order of the last backwards of their stages.
        """
        model, costs = self.model, self.problem.costs
        stages = sorted({place.stage for place in places})
        shared = [s for s in stages if len({self.problem.device_of[s, pipe] for pipe in range(self.problem.pipes)}) > 1]
        if not shared:
            return {}
        last = {stage: model.new_int_var(-len(places), self.horizon, "") for stage in stages}
        for stage in stages:
            ends = []
            for index, place in enumerate(places):
                if place.stage != stage:
                    continue
                if not place.micro_batches:
                    ends.append(model.new_constant(index - len(places)))  # before all others, in the order of places
                    continue
                steps, mine = self.steps[place.stage, place.pipe], self._time()
                split = self.splits.get(stage)
                if split is None:
                    model.add(mine == steps.gradient[-1][1])
                else:
                    model.add(mine == steps.gradient[-1][1]).only_enforce_if(~split)
                    model.add(mine == steps.weight[-1][1]).only_enforce_if(split)
                ends.append(mine)
            model.add_max_equality(last[stage], ends)
        before: dict[tuple[int, int], Any] = {}
        for first, second in combinations(stages, 2):
            before[first, second] = model.new_bool_var("")
            before[second, first] = ~before[first, second]
            model.add(last[first] <= last[second]).only_enforce_if(before[first, second])
            model.add(last[second] <= last[first]).only_enforce_if(before[second, first])
        return {
            stage: end
            + self.units(costs.sync[stage])
            + sum(self.units(costs.sync[other]) * before[other, stage] for other in stages if other != stage)
            for stage in shared
        }

    def schedule(self, solver: Any) -> Schedule:
        """The order of the solver's solution."""
        problem = self.problem
        recompute = frozenset(stage for stage, chosen in self.recomputes.items() if solver.value(chosen))
        split = {stage for stage, chosen in self.splits.items() if solver.value(chosen)}
        timed: list[list[tuple[int, int, int, Operation]]] = [[] for _ in range(problem.devices)]
        for place in self.places:
            steps = self.steps[place.stage, place.pipe]
            back = 2 * problem.stages - place.stage  # operations without duration run in the order of one micro-batch

            def add(kind: Kind, rank: int, number: int, step: Any, place: PipeStage = place) -> None:
                operation = Operation(kind, place.stage, (place.first + number,), place.pipe)
                timed[place.device].append((solver.value(step[0]), solver.value(step[1]), rank, operation))

            for number in range(place.micro_batches):
                add(Kind.FORWARD, 3 * place.stage, number, steps.forward[number])
                if place.stage in recompute and solver.value(steps.recompute[number][2]):
                    add(Kind.RECOMPUTE, 3 * back, number, steps.recompute[number])
                kind = Kind.BACKWARD_INPUT if place.stage in split else Kind.BACKWARD
                add(kind, 3 * back + 1, number, steps.gradient[number])
                if place.stage in split:
                    add(Kind.BACKWARD_WEIGHT, 3 * back + 2, number, steps.weight[number])
        return place_syncs(
            Schedule(
                name=NAME,
                stages=problem.stages,
                micro_batches=problem.micro_batches,
                device_of=problem.device_of,
                operations=tuple(
                    tuple(operation for *_, operation in sorted(entries, key=lambda entry: entry[:3]))
                    for entries in timed
                ),
                recompute=recompute,
            ),
            "lazy",
        )
