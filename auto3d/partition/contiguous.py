"""Contiguous parts of a sequence: the smallest possible largest part, and the cheapest cuts that keep to a limit.

The sequence is given by ``before``, the weight before each of its places; a part is ``(first, last)``, two places.
Every part must weigh something. ``earliest[part][last]`` is the least ``first`` with which that part may end at
``last``, by memory for example; it never falls along ``last``, and never rises from one part to the next.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

_BISECTIONS = 40
_ROUNDING = 1e-12  # two sums of the same weights may differ by this fraction


def smallest_maximum(before: Sequence[float], earliest: Sequence[Sequence[int]]) -> float | None:
    """The least L such that ``len(earliest)`` parts of at most L each hold everything; None if no L will do.

    A part that ends as late as it can never hurts the next ones, so whether L will do is seen in one pass; where it
    will not, that pass tells the least L that would change something.
    """
    least = max((before[-1] - before[0]) / len(earliest), max(after - here for here, after in pairwise(before)))
    fits, needed = _fill(before, earliest, before[-1] - before[0])
    if not fits:
        return None
    best = needed
    for _ in range(_BISECTIONS):
        middle = (least + best) / 2
        if not least < middle < best:
            break
        fits, weight = _fill(before, earliest, middle)
        if fits:
            best = weight
        else:
            least = weight
    while least < best:  # what is left between them is a handful of sums
        fits, weight = _fill(before, earliest, least)
        if fits:
            return weight
        least = weight
    return best


def _fill(before: Sequence[float], earliest: Sequence[Sequence[int]], limit: float) -> tuple[bool, float]:
    """Whether parts of at most ``limit`` hold all, and their largest; if not, the least larger limit worth trying."""
    first, largest, more = 0, 0.0, float("inf")
    for part in earliest:
        by_memory = bisect_right(part, first) - 1  # the last place at which a part from ``first`` may end
        by_weight = bisect_right(before, before[first] + limit) - 1
        while by_weight > first and before[by_weight] - before[first] > limit:  # the sum above was rounded
            by_weight -= 1
        while by_weight + 1 < len(before) and before[by_weight + 1] - before[first] <= limit:
            by_weight += 1
        last = min(by_memory, by_weight)
        if last <= first:
            last = first
        if by_weight < by_memory and by_weight + 1 < len(before):
            more = min(more, before[by_weight + 1] - before[first])
        largest = max(largest, before[last] - before[first])
        first = last
    done = first == len(before) - 1
    return done, largest if done else more


def cheapest_cuts(
    before: Sequence[float], cost: Sequence[float], earliest: Sequence[Sequence[int]], limit: float
) -> list[int] | None:
    """Places that bound parts of at most ``limit`` whose inner cuts cost least; None if there are none.

    Dynamic programming over (part, place). The window of possible previous cuts only moves forward, so its minimum is
    kept in a queue and the whole takes parts × places.
    """
    size = len(before)
    best: list[float] = [0.0] + [float("inf")] * (size - 1)
    previous: list[list[int]] = []
    for part in earliest:
        row, reached = [0] * size, [float("inf")] * size
        window: deque[int] = deque()
        enter = 0
        for place in range(size):
            while before[enter] < before[place]:
                while window and best[window[-1]] >= best[enter]:
                    window.pop()
                window.append(enter)
                enter += 1
            while window and (window[0] < part[place] or before[place] - before[window[0]] > limit):
                window.popleft()
            if window and best[window[0]] < float("inf"):
                row[place] = window[0]
                reached[place] = best[window[0]] + (cost[place] if place < size - 1 else 0)
        best = reached
        previous.append(row)
    if best[-1] == float("inf"):
        return None
    bounds = [size - 1]
    for row in reversed(previous):
        bounds.append(row[bounds[-1]])
    return bounds[::-1]


def balanced_cuts(
    before: Sequence[float], cost: Sequence[float], parts: int, earliest: Sequence[Sequence[int]] | None = None
) -> list[int] | None:
    """Places that bound ``parts`` parts whose largest is as small as can be and, among those, whose cuts cost least.

    None if no parts fit. Here ``earliest`` may rise from one part to the next; without it, every part fits.
    """
    if earliest is None:
        earliest = [[0] * len(before)] * parts
    if all(here >= there for one, following in pairwise(earliest) for here, there in zip(one, following, strict=True)):
        least = smallest_maximum(before, earliest)
        return None if least is None else cheapest_cuts(before, cost, earliest, least * (1 + _ROUNDING))
    weights = sorted({last - first for place, last in enumerate(before) for first in before[:place] if last > first})

    def cuts(index: int) -> list[int] | None:
        return cheapest_cuts(before, cost, earliest, weights[index] * (1 + _ROUNDING))

    if not weights or cuts(-1) is None:
        return None
    return cuts(bisect_left(range(len(weights)), True, key=lambda index: cuts(index) is not None))
