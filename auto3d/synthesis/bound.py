"""Lower bounds on the makespan of every order of a problem, for every choice of splitting and recomputing.

The micro-batches of a pipe run in ascending order on every stage without loss; ``auto3d.synthesis.exact`` has the
proof. Each operation then has a head, the earliest time at which it can begin, and a tail, the least time from its end
to the end of the iteration. They follow from arcs that hold in every order (``auto3d.synthesis.paths``): micro-batches
in ascending order, messages, and memory. The operations of a device with their heads and tails are a one-machine
problem; Jackson's schedule solves it at once if operations may be interrupted, which can only shorten it (Carlier, "The
one-machine sequencing problem", EJOR 11, 1982).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from heapq import heappop, heappush
from itertools import combinations, pairwise, product
from math import floor, inf

from auto3d.errors import InputError
from auto3d.synthesis.paths import Arc, Pipe, heads, least_time
from auto3d.synthesis.pipe_stage import PipeStage, pipe_stages
from auto3d.synthesis.problem import Problem

TOLERANCE = 1e-9  # relative error of sums of floats: bounds give way by it
NODES = 2000  # micro-batches on stages, over all nodes of a search: a tenth of a second
Key = tuple[int, int]  # (stage, pipe)
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


class _Place:
    """A stage on one pipe: the times for which its operations occupy their device, and its choices."""

    def __init__(self, place: PipeStage, problem: Problem) -> None:
        self.stage, self.pipe, self.device, self.count = place.stage, place.pipe, place.device, place.micro_batches
        self.key = place.stage, place.pipe
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


@dataclass(frozen=True)
class _Times:
    """Heads and tails of the operations of one pipe stage by micro-batch, and its arcs."""

    forward: list[Item]
    gradient: list[Item]
    weight: list[Item]  # empty if the stage does not split, or may also not split
    recompute: list[Item]  # empty likewise
    trip: float  # least time from the start of F to the end of the B or I of the same micro-batch


@dataclass(frozen=True, kw_only=True)
class _Node:
    """A bound of the orders with some choices open."""

    bound: Bound
    device: int  # the device that the bound is about
    options: Options
    memory: str  # the stage on which memory slows the micro-batches down most; empty if it does on none


@lru_cache(64)  # a synthesis and its certificate ask for the same problems several times
def lower_bound(problem: Problem) -> Bound:
    """The best of the proven lower bounds. Raises InputError if not even one micro-batch fits the memory.

    A branch-and-bound over the choices of the stages: a node leaves some of them open, and its bound takes the least
    time and the least bytes of all that are open. The least bound of the open nodes holds for all orders. After
    ``NODES`` / (stages x micro-batches) nodes it stays as it is.
    """
    places = [_Place(place, problem) for place in pipe_stages(problem)]
    every = tuple(
        tuple(
            (split, recompute)
            for split in ((False, True) if stage in problem.may_split else (False,))
            for recompute in ((False, True) if stage in problem.may_recompute else (False,))
        )
        for stage in range(problem.stages)
    )
    root = _bound(problem, places, every)
    nodes = [(root.bound.time, 0, root)] if root else []
    budget, made = NODES // (problem.stages * problem.micro_batches), 0
    while nodes and made < budget:
        least, _, node = nodes[0]
        stage = _branch(places, node)
        if stage is None:
            break
        heappop(nodes)
        for option in node.options[stage]:
            made += 1
            child = _bound(problem, places, (*node.options[:stage], (option,), *node.options[stage + 1 :]))
            if child is not None:
                heappush(nodes, (max(child.bound.time, least), made, child))
    if not nodes:
        raise InputError("problem: one micro-batch alone exceeds the memory of a device; free more of it")
    least, _, node = nodes[0]
    return Bound(time=least * (1 - TOLERANCE), reason=_explained(problem, places, node).reason)


def _branch(places: list[_Place], node: _Node) -> int | None:
    """The stage whose choice is decided next, on the node's device if possible; None if all are decided."""
    undecided = [place for place in places if len(node.options[place.stage]) > 1]
    return min(((place.device != node.device, place.stage) for place in undecided), default=(True, None))[1]


def _bound(problem: Problem, places: list[_Place], options: Options) -> _Node | None:
    """The bound of the orders with these choices; None if the memory admits none."""
    ends = _ends(problem, places)
    relaxed = {place.key: _least([place.choices[option] for option in options[place.stage]]) for place in places}
    times: dict[Key, _Times] = {}
    slowest, memory = 0.0, ""
    for pipe in range(problem.pipes):
        path = [place for place in places if place.pipe == pipe and place.count]
        if path:
            arcs = _memory_arcs(problem, path, relaxed)
            if arcs is None:
                return None
            times |= _times(path, relaxed, arcs, ends)
            for kind, top, base, room in arcs:
                trip = times[base, pipe].trip
                if kind == "G" and top == base and trip * path[0].count / room > slowest:
                    slowest = trip * path[0].count / room
                    memory = (
                        f"memory of device {problem.device_of[base, pipe]}: at most {room} "
                        f"micro-batch{'es' if room > 1 else ''} in flight on stage {base}, each for "
                        f"{trip:.4g} or longer"
                    )
    best, critical = Bound(time=0.0, reason="no work"), 0
    for device in range(problem.devices):
        mine = [place for place in places if place.device == device and place.count]
        stages = sorted({place.stage for place in mine})
        around = min((times[p.key].forward[0][0] for p in mine), default=0.0) + min(
            (ends[device], *(times[p.key].gradient[-1][2] for p in mine))
        )
        least = Bound(time=inf, reason="")
        for chosen in sorted(product(*(options[stage] for stage in stages)), key=partial(_work, mine, stages)):
            if around + _work(mine, stages, chosen) >= least.time:
                break  # no later choice has less work
            option_of = dict(zip(stages, chosen, strict=True))
            choices = {place.key: place.choices[option_of[place.stage]] for place in mine}
            here = _work_bound(device, mine, choices, times, ends[device])
            if here.time < least.time:
                shared = _memory_bound(problem.free[device], device, mine, choices, times)
                least = min(least, max(here, shared, key=lambda bound: bound.time), key=lambda bound: bound.time)
            if least.time <= best.time:
                break
        if mine and least.time > best.time:
            best, critical = least, device
    return _Node(bound=best, device=critical, options=options, memory=memory)


def _work(places: list[_Place], stages: list[int], chosen: tuple[tuple[bool, bool], ...]) -> float:
    """The work of all operations at these choices for ``stages``."""
    option_of = dict(zip(stages, chosen, strict=True))
    choices = [(place, place.choices[option_of[place.stage]]) for place in places]
    return sum(
        place.count * (place.forward + choice.gradient + choice.weight + choice.recompute) for place, choice in choices
    )


def _explained(problem: Problem, places: list[_Place], node: _Node) -> Bound:
    """The bound of ``node``, with memory as its reason if it is less without caps."""
    if node.memory:
        uncapped = _bound(replace(problem, free=(inf,) * problem.devices), places, node.options)
        if uncapped is None or uncapped.bound.time < node.bound.time * (1 - TOLERANCE):
            return replace(node.bound, reason=node.memory)
    return node.bound


def _least(choices: list[Choice]) -> Choice:
    """The least value of each field."""
    return Choice(**{name: min(getattr(choice, name) for choice in choices) for name in Choice.__dataclass_fields__})


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
            costs.sync[stage] + updates[other] for other, theirs in enumerate(stages_of) for stage in stages & theirs
        ]
        ends.append(max([alone, *joint]))
    return ends


def _memory_arcs(
    problem: Problem, path: list[_Place], choices: dict[Key, Choice]
) -> list[tuple[str, int, int, int]] | None:
    """(kind, top, base, m): the (n + m)-th F of stage ``base`` follows the n-th B, I or W of stage ``top``.

    None if one micro-batch does not fit. Both stages are on one device and on the pipe of ``path``.

    - B or I, ``base`` <= ``top``: otherwise the n-th B or I would run while m + 1 micro-batches are in flight on
      ``base``, since their backwards on ``base`` follow it. All of them are also in flight on the earlier stages of the
      device, and the n-th is in flight on all its stages up to ``top``. That does not fit.
    - W, ``base`` = ``top``: otherwise m further micro-batches would each be in flight or deferred on the stage at the
      start of that F. That does not fit.
    """
    arcs = []
    on: defaultdict[int, list[_Place]] = defaultdict(list)
    for place in path:
        on[place.device].append(place)
    for device, stages in on.items():
        free = problem.free[device] * (1 + TOLERANCE)
        below = 0.0
        for index, base in enumerate(stages):
            mine = choices[base.key]
            below += mine.held
            between = 0.0
            for top in stages[index:]:
                choice = choices[top.key]
                if top is not base:
                    between += choice.held
                room = free - between - (choice.whole - choice.held)
                if room < below:
                    return None
                if room < below * base.count:
                    arcs.append(("G", top.stage, base.stage, floor(room / below)))
            per_micro_batch = min(mine.held, mine.deferred)
            if mine.weight and free - below < per_micro_batch * (base.count - 1):
                arcs.append(("W", base.stage, base.stage, 1 + floor((free - below) / per_micro_batch)))
    return arcs


def _times(
    path: list[_Place], choices: dict[Key, Choice], memory: list[tuple[str, int, int, int]], ends: list[float]
) -> dict[Key, _Times]:
    """Heads and tails at these choices."""
    number: dict[tuple[str, int], int] = {}
    durations: list[float] = []
    devices: list[int] = []

    def add(kind: str, place: _Place, duration: float) -> None:
        number[kind, place.stage] = len(durations)
        durations.append(duration)
        devices.append(place.device)

    for place in path:
        add("F", place, place.forward)
    for place in reversed(path):
        choice = choices[place.key]
        if choice.recompute:
            add("R", place, choice.recompute)
        add("G", place, choice.gradient)
        if choice.weight:
            add("W", place, choice.weight)
    arcs = []
    for place in path:
        stage = place.stage
        for before, after in (("F", "G"), ("F", "R"), ("R", "G"), ("G", "W")):
            if (before, stage) in number and (after, stage) in number:
                arcs.append(Arc(before=number[before, stage], after=number[after, stage]))
    for place, following in pairwise(path):
        arcs.append(Arc(before=number["F", place.stage], after=number["F", following.stage], lag=place.forward_lag))
        arcs.append(
            Arc(before=number["G", following.stage], after=number["G", place.stage], lag=following.gradient_lag)
        )
    arcs += [
        Arc(before=number[kind, top], after=number["F", base], offset=offset) for kind, top, base, offset in memory
    ]
    graph = Pipe(
        micro_batches=path[0].count,
        devices=devices,
        durations=durations,
        release=[0.0] * len(durations),
        arcs=arcs,
    )
    earliest = heads(graph)
    latest = heads(graph.reversed([ends[device] for device in devices]))[::-1]

    def items(kind: str, place: _Place) -> list[Item]:
        node = number[kind, place.stage]
        return [
            (head, durations[node], tail) for head, tail in zip(earliest[node], reversed(latest[node]), strict=True)
        ]

    return {
        place.key: _Times(
            items("F", place),
            items("G", place),
            items("W", place) if ("W", place.stage) in number else [],
            items("R", place) if ("R", place.stage) in number else [],
            least_time(graph, number["F", place.stage], number["G", place.stage]),
        )
        for place in path
    }


def _work_bound(
    device: int, places: list[_Place], choices: dict[Key, Choice], times: dict[Key, _Times], end: float
) -> Bound:
    """The one-machine problem of all operations of a device."""
    items: list[Item] = []
    for place in places:
        choice, mine = choices[place.key], times[place.key]
        items += mine.forward
        items += [(head, choice.gradient, tail) for head, _, tail in mine.gradient]
        if choice.weight:
            items += mine.weight or [(head + choice.gradient, choice.weight, end) for head, _, _ in mine.gradient]
        if choice.recompute:
            items += mine.recompute or [
                (head + duration, choice.recompute, tail + choice.gradient)
                for (head, duration, _), (_, _, tail) in zip(mine.forward, mine.gradient, strict=True)
            ]
    return Bound(time=jackson(items), reason=f"work of device {device}")


def _memory_bound(
    free: float, device: int, places: list[_Place], choices: dict[Key, Choice], times: dict[Key, _Times]
) -> Bound:
    """The micro-batches in flight on several stages, which share the memory of their device.

    A micro-batch is in flight at least for its round trip through the later stages. With weights for which the
    micro-batches in flight never weigh more than 1, round trips times weights are a one-machine problem, too.
    """
    best = Bound(time=0.0, reason="")
    for weights in _weights(places, choices, free * (1 + TOLERANCE)) if free < inf else []:
        items = [
            (head, weight * times[key].trip, tail)
            for key, weight in weights.items()
            for (head, _, _), (_, _, tail) in zip(times[key].forward, times[key].gradient, strict=True)
        ]
        time = jackson(items)
        if time > best.time:
            best = Bound(
                time=time, reason=f"memory of device {device}: shared by the micro-batches in flight on its stages"
            )
    return best


def _weights(places: list[_Place], choices: dict[Key, Choice], free: float) -> list[dict[Key, float]]:
    """Weights for which the micro-batches that fit into ``free`` at a time never weigh more than 1.

    Bytes, and for each two stages on different pipes the edges of the convex hull of the numbers that fit together.
    """
    keys = [(place.stage, place.pipe) for place in places]
    held, below = {}, defaultdict[int, float](float)
    for key in keys:
        below[key[1]] += choices[key].held
        held[key] = below[key[1]]  # with the earlier stages of its pipe, on which the micro-batch is in flight, too
    weights = [{key: choices[key].held / free for key in keys}] if len(keys) > 1 and free else []
    for here, there in combinations(keys, 2):
        if here[1] == there[1] or not held[here] or not held[there]:
            continue
        corners: list[tuple[int, int]] = []
        for first in range(floor(free / held[here]) + 1):
            corner = first, floor((free - first * held[here]) / held[there])
            while len(corners) > 1 and _above(corners[-2], corners[-1], corner):
                corners.pop()
            corners.append(corner)
        for (x, y), (v, w) in pairwise(corners):
            area = v * y - x * w  # the line through both corners: (y - w) first + (v - x) second = area
            if area > 0 and y > w:
                weights.append({here: (y - w) / area, there: (v - x) / area})
    return weights


def _above(left: tuple[int, int], middle: tuple[int, int], right: tuple[int, int]) -> bool:
    """Whether ``middle`` is on or below the line from ``left`` to ``right``."""
    return (middle[1] - left[1]) * (right[0] - left[0]) <= (right[1] - left[1]) * (middle[0] - left[0])


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
