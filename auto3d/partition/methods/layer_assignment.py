"""AMP's layer assignment: the contiguous stages with the shortest pipeline (Li et al. 2022, section 4.3, ``pipe_dp``).

It minimises objective (4): (M - 1) max t + sum t + sum c, for M micro-batches, stage times t, each with what its stage
recomputes, and message times c between neighbouring stages. AMP's algorithm tries every possible value of the maximum.
This algorithm keeps, for each number of stages and each position, the assignments that no other beats in both the
maximum and the rest. Both are exact.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Any

from auto3d.partition.contiguous import Weights, balanced_cuts, lightest
from auto3d.partition.problem import StageProblem
from auto3d.partition.stage import check_enough
from auto3d.plan import StagePlan, stages_between

_Assignment = tuple[float, float, int, Any]
"""The slowest stage time, the sum of stage times and message times so far, the place, and the assignment before."""


def choose_stages(problem: StageProblem) -> tuple[StagePlan, ...]:
    """The stages with the shortest pipeline, cut at some of ``problem.cuts``, on devices of ``problem.speeds``.

    Raises PartitionError where there are too few operations.
    """
    check_enough(problem.before[0], problem.stages)
    bounds = _shortest_pipeline(problem.before, problem.messages, problem.speeds, problem.micro_batches)
    return stages_between([problem.cuts[bound] for bound in bounds])


def shortest_pipeline(
    before_of: Weights, messages: Sequence[float], speeds: Sequence[float], micro_batches: int
) -> list[int]:
    """Places that bound the parts with the least (M - 1) max t + sum t + sum c; each part must take some time.

    ``before_of`` has, for each part, the seconds before each place on a device of speed 1, ``messages`` the seconds of
    a cut there, and ``speeds`` the speed of each part's device.
    """
    last, repeated, light = len(messages) - 1, micro_batches - 1, lightest(before_of)
    fastest, cheapest = max(speeds), min(messages[1:last], default=0.0)
    whole = (light[last] - light[0]) / fastest  # the sum of stage times is no less
    bound = _balanced_objective(before_of, messages, speeds, micro_batches)
    best: dict[int, list[_Assignment]] = {0: [(0.0, 0.0, 0, None)]}  # place -> assignments that end there
    for stage, (before, speed) in enumerate(zip(before_of, speeds, strict=True)):
        reached: dict[int, list[_Assignment]] = {}
        left = len(speeds) - 1 - stage
        final = not left
        starts = list(best)

        def least_later(place: int, left: int = max(1, left)) -> float:
            """A lower bound of the slowest of the later stages."""
            return (light[last] - light[place]) / fastest / left

        first = bisect_left(range(last), True, key=lambda place: repeated * least_later(place) + whole <= bound)
        for place in [last] if final else range(max(1, first), last):
            candidates: list[_Assignment] = []
            least_slowest = least_later(place)
            after = (light[last] - light[place]) / fastest + cheapest * max(0, left - 1)
            message = 0.0 if final else messages[place]
            for start in reversed(starts[: bisect_left(starts, place)]):
                time = (before[place] - before[start]) / speed
                if repeated * time + whole > bound:  # earlier starts take even longer
                    break
                if time <= 0:
                    continue
                for assignment in best[start]:
                    slowest = assignment[0]
                    if slowest < time:
                        slowest = time
                    rest = assignment[1] + time + message
                    least = slowest if slowest > least_slowest else least_slowest
                    if repeated * least + rest + after <= bound:
                        candidates.append((slowest, rest, place, assignment))
            if candidates:
                reached[place] = _unbeaten(candidates)
            elif starts and repeated * (before[place] - before[starts[-1]]) / speed + whole > bound:
                break  # later places are too far from every start
        best = reached
    winner: _Assignment | None = min(best[last], key=lambda complete: repeated * complete[0] + complete[1])
    bounds = []
    while winner is not None:
        _, _, place, winner = winner
        bounds.append(place)
    return bounds[::-1]


_shortest_pipeline = lru_cache(4096)(shortest_pipeline)  # a search asks for the same stages under many schedules


def _unbeaten(assignments: list[_Assignment]) -> list[_Assignment]:
    """The assignments that no other assignment equals or beats in both figures."""
    kept: list[_Assignment] = []
    for assignment in sorted(assignments, key=itemgetter(0, 1)):
        if not kept or assignment[1] < kept[-1][1]:
            kept.append(assignment)
    return kept


def _balanced_objective(
    before: Weights, messages: Sequence[float], speeds: Sequence[float], micro_batches: int
) -> float:
    """The objective of parts that are balanced for equal speeds, rounded up a little: an upper bound of the best."""
    bounds = balanced_cuts(before, messages)
    assert bounds is not None, "without a memory limit there is always a partition"
    parts = zip(before, pairwise(bounds), speeds, strict=True)
    times = [(part[last] - part[first]) / speed for part, (first, last), speed in parts]
    total = (micro_batches - 1) * max(times) + sum(times) + sum(messages[place] for place in bounds[1:-1])
    return total * (1 + 1e-9)
