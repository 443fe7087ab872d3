"""Lower bounds on the makespan of every order of a problem, for every choice of splitting and recomputing.

The micro-batches of a pipe run in ascending order on every stage without loss; ``auto3d.synthesis.exact`` has the
proof. Each operation then has a head, the earliest time at which it can begin, and a tail, the least time from its end
to the end of the iteration. Heads are longest paths over arcs that hold in every order:

- From an operation to the same operation of the next micro-batch.
- From an operation to the one that needs its result, with the message between them.
- From the n-th backward to the (n + m)-th F, if the device has no room for m + 1 micro-batches; see ``_Arc``.
- From all operations of a device that precede an operation to this one: not before a machine that can take them one at
  a time, each from its head, has ended them.

Tails are the heads of the reversed problem. The operations of a device with their heads and tails are a one-machine
problem; Jackson's schedule solves it at once if operations may be interrupted, which can only shorten it (Carlier,
"The one-machine sequencing problem", EJOR 11, 1982).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import product
from math import floor, inf

import numpy as np

from auto3d.errors import InputError
from auto3d.synthesis.pipe_stage import PipeStage, pipe_stages
from auto3d.synthesis.problem import Problem

TOLERANCE = 1e-9  # relative error of sums of floats: bounds give way by it
NODES = 3000
Options = tuple[tuple[tuple[bool, bool], ...], ...]
"""Per stage, the choices that are open: (it splits its backward, it recomputes)."""
Item = tuple[float, float, float]
"""(head, duration, tail) of an operation on a device."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """No order of the problem is shorter than ``time``."""

    time: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How a stage on one pipe runs its backward: times on its device, and bytes of one micro-batch."""

    gradient: float  # time of B or I without recomputation
    weight: float  # time of W
    recompute: float
    held: float  # between forward and backward
    whole: float  # during the backward
    deferred: float  # from I to W


@dataclass(frozen=True, kw_only=True)
class Arc:
    """The (n + ``count``)-th F of ``base`` begins after the n-th backward of ``top``, a stage of the same device.

    Otherwise the backward of micro-batch n on ``top`` runs while ``count`` + 1 micro-batches are in flight on ``base``,
    since backwards of ``base`` follow it in ascending order. All of them are also in flight on the earlier stages of
    the device, and micro-batch n is in flight on all its stages up to ``top``. That does not fit.
    """

    pipe: int
    base: int
    top: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Line:
    """The operations of one pipe in time's direction or against it.

    In time's direction, the first operation of a stage is F and the second B or I; against it, the other way round.
    Both pass the stages of a micro-batch in the order first(0), first(1), …, second(1), second(0).
    """

    micro_batches: int
    devices: list[int]  # per stage
    first: list[float]  # duration, per stage
    second: list[float]
    first_gap: list[float]  # from the start of first(s - 1) to that of first(s)
    second_gap: list[float]  # from the start of second(s + 1) to that of second(s)
    arcs: list[tuple[int, int, int]]  # (b, t, m): first(b) of micro-batch n + m follows second(t) of n
    release: list[float]  # per stage


class _Place:
    """A stage on one pipe: the times for which its operations occupy their device, and its choices."""

    def __init__(self, place: PipeStage, problem: Problem) -> None:
        self.stage, self.pipe, self.device, self.count = place.stage, place.pipe, place.device, place.micro_batches
        overlap, stage = problem.costs.overlap, place.stage
        around_forward = 0.0 if overlap else place.receive_forward + place.send_forward
        around_gradient = 0.0 if overlap else place.receive_gradient + place.send_gradient
        # From the end of an operation to the start of the next. Without overlap, both contain the message.
        self.forward_lag = place.send_forward if overlap else -place.send_forward
        self.gradient_lag = place.send_gradient if overlap else -place.send_gradient
        self.forward = place.forward + around_forward
        whole, kept = problem.activation[stage], problem.kept[stage]
        self.choices = {
            (split, recompute): Choice(
                gradient=around_gradient + (place.backward_input if split else place.backward),
                weight=place.backward_weight if split else 0.0,
                recompute=place.recompute if recompute else 0.0,
                held=kept if recompute else whole,
                whole=whole,
                deferred=problem.deferred[stage] if split else 0.0,
            )
            for split in (False, True)
            for recompute in (False, True)
        }


def lower_bound(problem: Problem) -> Bound:
    """The best of the proven lower bounds. Raises InputError if not even one micro-batch fits the memory.

    A branch-and-bound over the choices of the stages: a node leaves some of them open, and its bound takes the least
    time and the least bytes of all that are open. The least bound of the open nodes holds for all orders. After
    ``NODES`` / (micro-batches of all stages) nodes it stays as it is.
    """
    places = [_Place(place, problem) for place in pipe_stages(problem)]
    ends = _ends(problem, places)
    every = tuple(
        tuple(
            (split, recompute)
            for split in ((False, True) if stage in problem.may_split else (False,))
            for recompute in ((False, True) if stage in problem.may_recompute else (False,))
        )
        for stage in range(problem.stages)
    )
    root = _bound(problem, places, ends, every)
    if root is None:
        raise InputError("problem: one micro-batch at a time exceeds the memory of a device; free more of it")
    nodes = [(root[0].time, 0, root[0], root[1], every)]
    budget = NODES // (problem.stages * problem.micro_batches)
    made = 0
    while made < budget:
        _, _, bound, device, options = nodes[0]
        stage = _branch(places, device, options)
        if stage is None:
            break
        heappop(nodes)
        for option in options[stage]:
            made += 1
            child = (*options[:stage], (option,), *options[stage + 1 :])
            node = _bound(problem, places, ends, child)
            if node is not None:
                better = node[0] if node[0].time > bound.time else bound
                heappush(nodes, (better.time, made, better, node[1], child))
    return replace(nodes[0][2], time=nodes[0][0] * (1 - TOLERANCE))


def _branch(places: list[_Place], device: int, options: Options) -> int | None:
    """The stage whose choice is decided next: one of ``device``, if any is open; None if all are decided."""
    stages = {stage for stage, choices in enumerate(options) if len(choices) > 1}
    return min((s for s in stages if any(p.stage == s and p.device == device for p in places)), default=min(stages, default=None))


def _bound(problem: Problem, places: list[_Place], ends: list[float], options: Options) -> tuple[Bound, int] | None:
    """A bound for the orders with these choices, and the device that it is about; None if the memory admits none."""
    names = ("gradient", "weight", "recompute", "held", "whole", "deferred")
    relaxed = {
        (p.stage, p.pipe): Choice(
            **{name: min(getattr(p.choices[option], name) for option in options[p.stage]) for name in names}
        )
        for p in places
    }
    arcs = _arcs(problem, places, relaxed)
    if arcs is None:
        return None
    heads, tails = {}, {}
    for pipe in range(problem.pipes):
        line = [(place, relaxed[place.stage, place.pipe]) for place in places if place.pipe == pipe]
        mine = [arc for arc in arcs if arc.pipe == pipe]
        heads[pipe] = _heads(_forth(line, mine))
        tails[pipe] = _heads(_back(line, mine, ends))
    best, critical = Bound(time=0.0, reason="no work"), 0
    for device in range(problem.devices):
        mine = [place for place in places if place.device == device and place.count]
        stages = sorted({place.stage for place in mine})
        least = inf
        for chosen in product(*(options[stage] for stage in stages)):
            option_of = dict(zip(stages, chosen, strict=True))
            items: list[Item] = []
            for place in mine:
                choice = place.choices[option_of[place.stage]]
                first, second = (side[place.stage] for side in heads[place.pipe])
                last_tails, tail_list = (side[place.stage] for side in tails[place.pipe])
                for n in range(place.count):
                    back = place.count - 1 - n
                    items.append((first[n], place.forward, tail_list[back]))
                    items.append((second[n], choice.gradient, last_tails[back]))
                    if choice.weight:
                        items.append((second[n] + choice.gradient, choice.weight, ends[device]))
                    if choice.recompute:
                        items.append((first[n] + place.forward, choice.recompute, last_tails[back] + choice.gradient))
            least = min(least, jackson(items))
            if least <= best.time:
                break
        if mine and least > best.time:
            best, critical = Bound(time=least, reason=f"work of device {device}"), device
    return best, critical


def jackson(items: Sequence[Item]) -> float:
    """The makespan, with tails, of one machine that always runs the released operation with the longest tail."""
    released: list[tuple[float, float]] = []  # (-tail, remaining duration)
    now = longest = 0.0
    waiting = sorted(items)
    for index, (head, duration, tail) in enumerate(waiting):
        now = max(now, head)
        heappush(released, (-tail, duration))
        until = waiting[index + 1][0] if index + 1 < len(waiting) else inf
        while released and now < until:
            urgency, remaining = heappop(released)
            if now + remaining > until:
                heappush(released, (urgency, remaining - (until - now)))
                now = until
            else:
                now += remaining
                longest = max(longest, now - urgency)
    return longest


def _ends(problem: Problem, places: list[_Place]) -> list[float]:
    """Per device, the least time from the end of its last operation to the end of the iteration.

    Its syncs run one after another and its updates follow. Each other device with one of its stages waits for the sync
    of that stage before its updates.
    """
    costs = problem.costs
    stages_of: list[set[int]] = [set() for _ in range(problem.devices)]
    updates = [0.0] * problem.devices
    for place in places:
        stages_of[place.device].add(place.stage)
        updates[place.device] += costs.update[place.stage] / costs.speed[place.device]
    ends = []
    for device, stages in enumerate(stages_of):
        alone = sum(costs.sync[stage] for stage in stages) + updates[device]
        joint = [
            costs.sync[stage] + updates[other]
            for other, theirs in enumerate(stages_of)
            for stage in stages & theirs
        ]
        ends.append(max([alone, *joint]))
    return ends


def _arcs(problem: Problem, places: list[_Place], choices: dict[tuple[int, int], Choice]) -> list[Arc] | None:
    """The memory arcs at these choices; None if one micro-batch does not fit."""
    arcs = []
    on: defaultdict[tuple[int, int], list[_Place]] = defaultdict(list)
    for place in places:
        if place.count:
            on[place.pipe, place.device].append(place)
    for (pipe, device), stages in on.items():
        free = problem.free[device] * (1 + TOLERANCE)
        below = 0.0
        for index, base in enumerate(stages):
            below += choices[base.stage, pipe].held
            between = 0.0
            for top in stages[index:]:
                choice = choices[top.stage, pipe]
                if top is not base:
                    between += choice.held
                room = free - between - (choice.whole - choice.held)
                if room < below:
                    return None
                if room < below * base.count:
                    arcs.append(Arc(pipe=pipe, base=base.stage, top=top.stage, count=floor(room / below)))
    return arcs


def _forth(pairs: list[tuple[_Place, Choice]], arcs: list[Arc]) -> Line:
    forward, gradient = [place.forward for place, _ in pairs], [choice.gradient for _, choice in pairs]
    return Line(
        micro_batches=pairs[0][0].count,
        devices=[place.device for place, _ in pairs],
        first=forward,
        second=gradient,
        first_gap=[0.0, *(place.forward + place.forward_lag for place, _ in pairs[:-1])],
        second_gap=[*(choice.gradient + place.gradient_lag for place, choice in pairs[1:]), 0.0],
        arcs=[(arc.base, arc.top, arc.count) for arc in arcs],
        release=[0.0] * len(pairs),
    )


def _back(pairs: list[tuple[_Place, Choice]], arcs: list[Arc], ends: list[float]) -> Line:
    """The reversed pipe: the gradient of stage 0 comes first, its forward last."""
    forward, gradient = [place.forward for place, _ in pairs], [choice.gradient for _, choice in pairs]
    forward_lag, gradient_lag = ([p.forward_lag for p, _ in pairs], [p.gradient_lag for p, _ in pairs])
    return Line(
        micro_batches=pairs[0][0].count,
        devices=[place.device for place, _ in pairs],
        first=gradient,
        second=forward,
        first_gap=[0.0, *map(sum, zip(gradient[:-1], gradient_lag[1:], strict=True))],
        second_gap=[*map(sum, zip(forward[1:], forward_lag[:-1], strict=True)), 0.0],
        arcs=[(arc.top, arc.base, arc.count) for arc in arcs],
        release=[ends[place.device] for place, _ in pairs],
    )


def _heads(line: Line) -> tuple[list[list[float]], list[list[float]]]:
    """The heads of the first and of the second operations: per stage, per micro-batch."""
    heads = _longest_paths(line, None)
    return _longest_paths(line, _machine_ends(line, *heads)) if line.micro_batches else heads


def _longest_paths(
    line: Line, floors: tuple[list[list[float]], list[list[float]]] | None
) -> tuple[list[list[float]], list[list[float]]]:
    stages = range(len(line.first))
    first: list[list[float]] = [[] for _ in stages]
    second: list[list[float]] = [[] for _ in stages]
    into: list[list[tuple[int, int]]] = [[(t, m) for b, t, m in line.arcs if b == stage] for stage in stages]
    for n in range(line.micro_batches):
        at = 0.0
        for s in stages:
            at = max(at + line.first_gap[s], line.release[s])
            if n:
                at = max(at, first[s][-1] + line.first[s])
            for top, count in into[s]:
                if n >= count:
                    at = max(at, second[top][n - count] + line.second[top])
            if floors:
                at = max(at, floors[0][s][n])
            first[s].append(at)
        at = 0.0
        for s in reversed(stages):
            at = max(at + line.second_gap[s], first[s][n] + line.first[s])
            if n:
                at = max(at, second[s][-1] + line.second[s])
            if floors:
                at = max(at, floors[1][s][n])
            second[s].append(at)
    return first, second


def _machine_ends(
    line: Line, first: list[list[float]], second: list[list[float]]
) -> tuple[list[list[float]], list[list[float]]]:
    """For each operation, when one machine has ended all that precede it on its device, each begun at its head or later.

    Operations of a device precede each other by offsets: all of one kind and stage up to micro-batch n - o precede
    micro-batch n of another. Offsets add up along paths of arcs.
    """
    ends: tuple[list[list[float]], list[list[float]]] = ([[]] * len(first), [[]] * len(first))
    for device in set(line.devices):
        stages = [s for s, home in enumerate(line.devices) if home == device]
        kinds = [(0, s) for s in stages] + [(1, s) for s in reversed(stages)]  # in the order of one micro-batch
        offsets = {
            (one, two): float(i >= j) if i == j else (0.0 if i < j else inf)
            for i, one in enumerate(kinds)
            for j, two in enumerate(kinds)
        }
        for base, top, count in line.arcs:
            if base in stages:
                offsets[(1, top), (0, base)] = min(offsets[(1, top), (0, base)], float(count))
        for via in kinds:
            for one in kinds:
                for two in kinds:
                    offsets[one, two] = min(offsets[one, two], offsets[one, via] + offsets[via, two])
        heads = {kind: np.array((first, second)[kind[0]][kind[1]]) for kind in kinds}
        durations = {kind: (line.first, line.second)[kind[0]][kind[1]] for kind in kinds}
        thresholds = np.unique(np.concatenate(list(heads.values())))
        earlier = {kind: np.searchsorted(heads[kind], thresholds) for kind in kinds}
        numbers = np.arange(line.micro_batches)
        for kind in kinds:
            work = np.zeros((line.micro_batches, len(thresholds)))
            for other in kinds:
                offset = offsets[other, kind]
                if offset < line.micro_batches:
                    ended = numbers[:, None] + 1 - int(offset)
                    work += durations[other] * np.maximum(ended - earlier[other][None, :], 0)
            ends[kind[0]][kind[1]] = np.where(work > 0, work + thresholds, 0.0).max(axis=1).tolist()
    return ends
