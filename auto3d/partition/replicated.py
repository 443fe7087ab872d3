"""Stages with replicas: where to cut a model into contiguous stages, and how many replicas each stage gets."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

_BISECTIONS = 50  # about as many halvings as a double has bits
_ROUNDING = 1e-9


def fastest_stages(
    before: Mapping[int, Sequence[Sequence[float]]], *, stages: int, devices: int
) -> tuple[list[int], list[int]] | None:
    """(places that bound the stages, replicas of each stage) with the fastest possible slowest stage.

    ``before[count][stage]`` has the seconds before each place on one of ``count`` replicas of a stage, each of which
    runs an equal slice of a micro-batch. Only these counts are possible, and the counts of all stages add up to
    ``devices``. None if they cannot, or if there are fewer parts than stages. This solves the problem of RaNNC's
    dynamic programming (Tanaka et al. 2021, algorithm 1), memory aside. A bisection in which each stage ends as late as
    a limit allows comes near, and mostly finds the best; then all places where stages may end are tried.
    """
    highest = max(times[-1] - times[0] for of_stages in before.values() for times in of_stages)
    best = _fill(before, stages, devices, highest)
    low = 0.0
    for _ in range(_BISECTIONS if best else 0):
        limit = (low + highest) / 2
        better = _fill(before, stages, devices, limit)
        if better is None:
            low = limit
        else:
            best, highest = better, limit
    while better := _within(before, stages, devices, _less(before, *best) if best else highest):
        best = better
    return best


def _less(before: Mapping[int, Sequence[Sequence[float]]], bounds: Sequence[int], counts: Sequence[int]) -> float:
    """A little less than the seconds of the slowest of these stages."""
    stages = enumerate(zip(pairwise(bounds), counts, strict=True))
    times = (before[count][stage][last] - before[count][stage][first] for stage, ((first, last), count) in stages)
    return max(times) * (1 - _ROUNDING)


def _within(
    before: Mapping[int, Sequence[Sequence[float]]], stages: int, devices: int, limit: float
) -> tuple[list[int], list[int]] | None:
    """(bounds, replicas) of stages that take at most ``limit`` seconds each; None if there are no such stages."""
    size = len(next(iter(before.values()))[0])
    reached = [{0: 1}]  # per number of stages: devices used -> the places where the last stage may end, one bit each
    for stage in range(stages):
        further: dict[int, int] = {}
        for count, of_stages in before.items():
            latest = _latest_ends(of_stages[stage], limit)
            for used, places in reached[-1].items():
                if used + count <= devices:
                    further[used + count] = further.get(used + count, 0) | _ends(places, latest)
        reached.append(further)
    used, last = devices, size - 1
    if not reached[-1].get(used, 0) >> last & 1:
        return None
    bounds, counts = [last], []
    for stage in reversed(range(stages)):
        used, last, count = next(
            (used - count, first, count)
            for count, of_stages in before.items()
            for first in range(last)
            if reached[stage].get(used - count, 0) >> first & 1
            and of_stages[stage][last] - of_stages[stage][first] <= limit
        )
        bounds.append(last)
        counts.append(count)
    return bounds[::-1], counts[::-1]


def _latest_ends(times: Sequence[float], limit: float) -> list[int]:
    """For each place, the last place at which a stage that begins there may end; the place itself if there is none."""
    ends, last = [], 0
    for first in range(len(times)):
        last = max(first, last)
        while last + 1 < len(times) and times[last + 1] - times[first] <= limit:
            last += 1
        ends.append(last)
    return ends


def _ends(places: int, latest: Sequence[int]) -> int:
    """The places, one bit each, where a stage may end that begins at one of ``places``."""
    ends = 0
    for first, last in enumerate(latest):
        if places >> first & 1:
            ends |= (1 << last + 1) - (1 << first + 1)
    return ends


def _fill(
    before: Mapping[int, Sequence[Sequence[float]]], stages: int, devices: int, limit: float
) -> tuple[list[int], list[int]] | None:
    """(bounds, replicas) of stages that take at most ``limit`` seconds each; None if there are no such stages."""
    size = len(next(iter(before.values()))[0])
    reached: dict[int, tuple[int, tuple[int, ...], tuple[int, ...]]] = {0: (0, (0,), ())}  # devices used -> best so far
    for stage in range(stages):
        latest = size - (stages - stage)  # each later stage needs a part
        further: dict[int, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        for used, (first, bounds, counts) in reached.items():
            for count, of_stages in before.items():
                times = of_stages[stage]
                last = min(bisect_right(times, times[first] + limit) - 1, latest)
                after = used + count
                if last > first and after <= devices and last > further.get(after, (0,))[0]:
                    further[after] = last, (*bounds, last), (*counts, count)
        reached = further
    last, bounds, counts = reached.get(devices, (0, (), ()))
    return (list(bounds), list(counts)) if last == size - 1 else None
