"""Stages with replicas: where to cut a model into contiguous stages, and how many replicas each stage gets."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

_BISECTIONS = 50  # about as many halvings as a double has bits


def fastest_stages(
    before: Mapping[int, Sequence[float]], *, stages: int, devices: int
) -> tuple[list[int], list[int]] | None:
    """(places that bound the stages, replicas of each stage) with the fastest possible slowest stage.

    ``before[count]`` has the seconds before each place on one of ``count`` replicas, each of which runs an equal slice
    of a micro-batch. Only these counts are possible, and the counts of all stages add up to ``devices``. None if they
    cannot, or if there are fewer parts than stages. This solves the problem of RaNNC's dynamic programming (Tanaka et
    al. 2021, algorithm 1), memory aside, by bisection: a stage that ends as late as a limit allows never hurts the next
    ones.
    """
    highest = max(times[-1] - times[0] for times in before.values())
    found = _fill(before, stages, devices, highest)
    if found is None:
        return None
    low = 0.0
    for _ in range(_BISECTIONS):
        limit = (low + highest) / 2
        better = _fill(before, stages, devices, limit)
        if better is None:
            low = limit
        else:
            found, highest = better, limit
    return found


def _fill(
    before: Mapping[int, Sequence[float]], stages: int, devices: int, limit: float
) -> tuple[list[int], list[int]] | None:
    """(bounds, replicas) of stages that take at most ``limit`` seconds each; None if there are no such stages."""
    size = len(next(iter(before.values())))
    reached: dict[int, tuple[int, tuple[int, ...], tuple[int, ...]]] = {0: (0, (0,), ())}  # devices used -> best so far
    for stage in range(stages):
        latest = size - (stages - stage)  # each later stage needs a part
        further: dict[int, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        for used, (first, bounds, counts) in reached.items():
            for count, times in before.items():
                last = min(bisect_right(times, times[first] + limit) - 1, latest)
                after = used + count
                if last > first and after <= devices and last > further.get(after, (0,))[0]:
                    further[after] = last, (*bounds, last), (*counts, count)
        reached = further
    last, bounds, counts = reached.get(devices, (0, (), ()))
    return (list(bounds), list(counts)) if last == size - 1 else None
