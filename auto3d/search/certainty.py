"""The fastest of several plans by repeated trials, and the certainty that it is the fastest.

The logarithms of the times of all plans are assumed to have the same variance, since the noise of a machine is
relative. The pooled variance and Student's distribution give the probability that a plan with a slower median is the
faster plan. Plans are compared by their medians, since single trials can take twice as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi
from statistics import median

import numpy as np

CERTAIN = 0.95
MEDIAN = pi / 2  # upper bound of the median's variance over the mean's, for normal values; for two values it is 1


@dataclass(frozen=True, kw_only=True)
class PlanComparison:
    """``fastest`` is the plan with the lowest median; ``doubts`` has each plan's probability of being faster."""

    fastest: int
    doubts: tuple[float, ...]

    @property
    def certainty(self) -> float:
        """A lower bound of the probability that no other plan is faster."""
        return max(0.0, 1 - sum(self.doubts))


def compare_plans(times: Sequence[Sequence[float]]) -> PlanComparison:
    """The comparison of plans by the ``times`` of their trials. Without a repeated trial, their variance is unknown."""
    from scipy.stats import t as student  # slow to import

    fastest = min(range(len(times)), key=lambda plan: median(times[plan]))
    logs = [np.log(trials) for trials in times]
    freedom = sum(len(trials) - 1 for trials in times)
    variance = sum(float(((trials - trials.mean()) ** 2).sum()) for trials in logs) / max(1, freedom)
    errors = [variance * (MEDIAN if len(trials) > 2 else 1.0) / len(trials) for trials in times]
    doubts = []
    for plan in range(len(times)):
        slower = float(np.median(logs[plan]) - np.median(logs[fastest]))
        error = (errors[plan] + errors[fastest]) ** 0.5
        if plan == fastest:
            doubts.append(0.0)
        elif not freedom or (error == 0 and slower <= 0):
            doubts.append(0.5)
        else:
            doubts.append(float(student.sf(slower / error, freedom)) if error else 0.0)
    return PlanComparison(fastest=fastest, doubts=tuple(doubts))


def contenders(times: Sequence[Sequence[float]], most: int) -> list[int]:
    """The plans to try again: the fastest, and at most ``most`` - 1 others that may be faster.

    The most likely plans come first; as long as no trial was repeated, the next fastest. The list is empty once it is
    certain which plan is the fastest.
    """
    comparison = compare_plans(times)
    if len(times) < 2 or comparison.certainty >= CERTAIN:
        return []
    others = [plan for plan in range(len(times)) if plan != comparison.fastest]
    enough = (1 - CERTAIN) / len(others)
    doubtful = [plan for plan in others if comparison.doubts[plan] > enough]
    doubtful.sort(key=lambda plan: (-comparison.doubts[plan], median(times[plan])))
    return [comparison.fastest, *doubtful[: max(1, most - 1)]]
