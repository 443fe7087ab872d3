"""Uniform partition: contiguous stages of nearly equal FLOPs, cut where little has to be sent."""

from collections import deque
from itertools import accumulate, pairwise

from auto3d.capture.graph import Graph
from auto3d.errors import InputError
from auto3d.partition.stage import possible_cuts
from auto3d.plan import StagePlan, stages_between

TOLERANCE = 0.05  # a stage may exceed the best balance by this share if that makes messages smaller


class PartitionError(InputError):
    """A model that cannot be cut into so many stages."""


def uniform(graph: Graph, stages: int) -> tuple[StagePlan, ...]:
    """Cut ``graph`` so that the largest stage has the fewest FLOPs and, within TOLERANCE, the cuts the fewest bytes.

    Every stage has operations that cost something: raises PartitionError where there are too few of them.
    """
    if stages == 1:
        return stages_between([0, len(graph.nodes)])
    positions = possible_cuts(graph)
    flops = [0, *accumulate(node.flops for node in graph.nodes)]  # before each operation
    before = [flops[position] for position in positions]
    costly = sum(after > here for here, after in pairwise(before))
    if stages > costly:
        raise PartitionError(
            f"{stages} stages, but only {costly} operations of the model cost anything; each stage needs one"
        )
    limit = int(_smallest_maximum(before, stages) * (1 + TOLERANCE))
    crossing = crossing_bytes(graph)
    bounds = _fewest_bytes(before, [crossing[position] for position in positions], stages, limit)
    return stages_between([positions[bound] for bound in bounds])


def crossing_bytes(graph: Graph) -> list[int]:
    """Bytes that a cut before each operation would send onward; entry i is the cut before operation i."""
    last_use = {name: index for index, node in enumerate(graph.nodes) for name in node.reads}
    change = [0] * (len(graph.nodes) + 1)
    for index, node in enumerate(graph.nodes):
        for value in node.outputs:
            if not node.from_inputs and last_use.get(value.name, index) > index:
                change[index + 1] += value.bytes
                change[last_use[value.name] + 1] -= value.bytes
    return list(accumulate(change))


def _smallest_maximum(before: list[int], stages: int) -> int:
    """The least L such that ``stages`` contiguous parts of at most L FLOPs each hold everything."""

    def parts(limit: int) -> int:
        count, start = 1, 0
        for position in range(1, len(before)):
            if before[position] - before[start] > limit:
                count, start = count + 1, position - 1
        return count

    low = max(after - here for here, after in pairwise(before))
    high = before[-1]
    while low < high:
        middle = (low + high) // 2
        if parts(middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _fewest_bytes(before: list[int], crossing: list[int], stages: int, limit: int) -> list[int]:
    """Bounds of ``stages`` parts, each of 1 to ``limit`` FLOPs, whose cuts cross the fewest bytes.

    Dynamic programming over (stages, position); the window of possible previous cuts only moves forward, so its
    minimum is kept in a queue and the whole costs stages × operations.
    """
    size = len(before)
    best: list[float] = [0.0] + [float("inf")] * (size - 1)
    previous: list[list[int]] = []
    for _ in range(stages):
        row, cost = [0] * size, [float("inf")] * size
        window: deque[int] = deque()
        enter = 0
        for position in range(size):
            while before[enter] < before[position]:
                while window and best[window[-1]] >= best[enter]:
                    window.pop()
                window.append(enter)
                enter += 1
            while window and before[position] - before[window[0]] > limit:
                window.popleft()
            if window and best[window[0]] < float("inf"):
                row[position] = window[0]
                cost[position] = best[window[0]] + (crossing[position] if position < size - 1 else 0)
        best = cost
        previous.append(row)
    bounds = [size - 1]
    for row in reversed(previous):
        bounds.append(row[bounds[-1]])
    return bounds[::-1]
