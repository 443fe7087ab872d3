"""Cutting a sequence into contiguous parts: the smallest possible largest part, and the cheapest cuts within a limit.

``before[part][place]`` is the weight of everything before a place of the sequence, as that part weighs it; parts that
weigh alike may have one object. A part is a pair of places ``(first, last)``. Every part must weigh something.
``earliest[part][last]`` is the smallest ``first`` with which that part may end at ``last``, because of memory for
example. It never falls along ``last``. Except in ``balanced_cuts`` and ``cheapest_cuts``, it never rises from one part
to the next, and no stretch of the sequence weighs more in the next part.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

_BISECTIONS = 40
_STEP = 1.25  # factor by which a limit that is not enough grows
_ROUNDING = 1e-12  # two sums of the same weights may differ by this fraction

Weights = Sequence[Sequence[float]]
"""Per part, the weight of everything before each place."""


def smallest_maximum(before: Weights, earliest: Sequence[Sequence[int]]) -> float | None:
    """The smallest limit L within which ``len(earliest)`` parts cover the sequence; None if no limit is enough.

    One pass decides whether a limit is enough, since a part that ends as late as possible never hurts the next parts:
    where it leaves none of them anything within the limit, they can take over what the parts before them hold. If the
    limit is not enough, the same pass yields the smallest larger limit that would make a difference.
    """
    least = _least(before)
    steps = [0, *accumulate(int(after > here) for here, after in pairwise(before[0]))]
    fits, needed = _fill(before, steps, earliest, max(part[-1] - part[0] for part in before))
    if not fits:
        return None
    best = needed
    for _ in range(_BISECTIONS):
        middle = (least + best) / 2
        if not least < middle < best:
            break
        fits, weight = _fill(before, steps, earliest, middle)
        if fits:
            best = weight
        else:
            least = weight
    while least < best:  # only a few possible sums lie between the two now
        fits, weight = _fill(before, steps, earliest, least)
        if fits:
            return weight
        least = weight
    return best


def lightest(before: Weights) -> Sequence[float]:
    """The weight before each place if every step to the next place weighs the least that it does in any part."""
    distinct = list({id(part): part for part in before}.values())
    if len(distinct) == 1:
        return distinct[0]
    steps = zip(*([after - here for here, after in pairwise(part)] for part in distinct), strict=True)
    return [0.0, *accumulate(map(min, steps))]


def _least(before: Weights) -> float:
    """A lower bound of the largest part: the mean part, or the heaviest step."""
    light = lightest(before)
    return max((light[-1] - light[0]) / len(before), max(after - here for here, after in pairwise(light)))


def _never_heavier(before: Weights) -> bool:
    """Whether no step from one place to the next weighs more in a part than in the part before it."""
    return all(
        part is following
        or all(
            there - then <= here - now + _ROUNDING * part[-1]
            for (now, here), (then, there) in zip(pairwise(part), pairwise(following), strict=True)
        )
        for part, following in pairwise(before)
    )


def _fill(
    weights: Weights, steps: Sequence[int], earliest: Sequence[Sequence[int]], limit: float
) -> tuple[bool, float]:
    """(True, the largest part) if parts within ``limit`` cover the sequence, else (False, the next limit to try).

    ``steps`` has the number of steps that weigh something before each place.
    """
    first, largest, more = 0, 0.0, float("inf")
    for number, (before, part) in enumerate(zip(weights, earliest, strict=True), start=1):
        by_memory = bisect_right(part, first) - 1  # last place at which a part that begins at ``first`` may end
        by_weight = bisect_right(before, before[first] + limit) - 1
        while by_weight > first and before[by_weight] - before[first] > limit:  # the sum above was rounded up
            by_weight -= 1
        while by_weight + 1 < len(before) and before[by_weight + 1] - before[first] <= limit:
            by_weight += 1
        last = min(by_memory, by_weight)
        if last <= first:
            last = first
        if by_weight < by_memory and by_weight + 1 < len(before):
            more = min(more, before[by_weight + 1] - before[first])
        largest = max(largest, before[last] - before[first])
        if steps[last] < number:  # the parts so far cannot each have something
            return False, more
        first = last
    done = first == len(weights[0]) - 1
    return done, largest if done else more


def cheapest_cuts(
    weights: Weights, cost: Sequence[float], earliest: Sequence[Sequence[int]], limit: float
) -> list[int] | None:
    """Places that bound parts within ``limit`` whose inner cuts have the least total cost; None if there are none.

    Dynamic programming over (part, place). The window of possible previous cuts only moves forward, so a queue holds
    its minimum and the run time is proportional to parts × places. A place that leaves more than the parts to come can
    hold is skipped.
    """
    size, light = len(cost), lightest(weights)
    best: list[float] = [0.0] + [float("inf")] * (size - 1)
    first, stop = 0, 1  # all places where the parts so far may end lie between these
    previous: list[list[int]] = []
    for number, (before, part) in enumerate(zip(weights, earliest, strict=True), start=1):
        row, reached = [0] * size, [float("inf")] * size
        window: deque[int] = deque()
        ends = [place for place in range(first, stop) if best[place] < float("inf")]
        if not ends:
            return None
        enter = ends[0]
        held_by_rest = (len(earliest) - number) * limit * (1 + _ROUNDING)
        first = stop = max(enter + 1, bisect_left(light, light[-1] - held_by_rest))
        for place in range(first, size):
            if before[place] - before[ends[-1]] > limit:
                break
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
            stop = place + 1
        best = reached
        previous.append(row)
    if best[-1] == float("inf"):
        return None
    bounds = [size - 1]
    for row in reversed(previous):
        bounds.append(row[bounds[-1]])
    return bounds[::-1]


def balanced_cuts(
    before: Weights, cost: Sequence[float], earliest: Sequence[Sequence[int]] | None = None
) -> list[int] | None:
    """Places that bound parts with the smallest largest part and, among those, the cheapest cuts.

    None if no parts fit. ``earliest`` may rise from one part to the next here, and weights too; None: every part fits.
    """
    if earliest is None:
        earliest = [[0] * len(cost)] * len(before)
    if _never_heavier(before) and all(
        here >= there for part, following in pairwise(earliest) for here, there in zip(part, following, strict=True)
    ):
        least = smallest_maximum(before, earliest)
        return None if least is None else cheapest_cuts(before, cost, earliest, least * (1 + _ROUNDING))
    least, most = _least(before), max(part[-1] - part[0] for part in before)

    def cuts(limit: float) -> list[int] | None:
        return cheapest_cuts(before, cost, earliest, limit * (1 + _ROUNDING))

    enough = least
    while cuts(enough) is None:
        if not enough < most:
            return None
        enough *= _STEP
    sums = sorted(
        {
            last - first
            for part in {id(part): part for part in before}.values()
            for place, last in enumerate(part)
            for first in part[:place]
            if least * (1 - _ROUNDING) <= last - first <= enough * (1 + _ROUNDING) and last > first
        }
    )
    return cuts(sums[bisect_left(sums, True, key=lambda limit: cuts(limit) is not None)])
