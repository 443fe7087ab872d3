"""Which of several plans is the fastest, by repeated trials, and how certain that is.

The logarithms of one plan's times are taken to spread as much as those of another: the noise of a machine is relative.
Their pooled variance and Student's distribution give the probability that a plan which came out slower is the faster.
Plans are compared by their medians, since single trials may take twice as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi
from statistics import median

import numpy as np

CERTAIN = 0.95
MEDIAN = pi / 2  # variance of the median of normal values, at most, over that of their mean; equal for two


@dataclass(frozen=True, kw_only=True)
class PlanComparison:
    """``fastest`` is the plan of the lowest median; ``doubts`` are probabilities that the others are faster."""

    fastest: int
    doubts: tuple[float, ...]

    @property
    def certainty(self) -> float:
        """A lower bound of the probability that no other plan is faster."""
        return max(0.0, 1 - sum(self.doubts))


def compare_plans(times: Sequence[Sequence[float]]) -> PlanComparison:
    """What the ``times`` of each plan's trials say; without any repeated trial nothing is known of their spread."""
    from scipy.stats import t as student  # slow to import

    fastest = min(range(len(times)), key=lambda plan: median(times[plan]))
    logs = [np.log(own) for own in times]
    freedom = sum(len(own) - 1 for own in times)
    variance = sum(float(((own - own.mean()) ** 2).sum()) for own in logs) / max(1, freedom)
    errors = [variance * (MEDIAN if len(own) > 2 else 1.0) / len(own) for own in times]
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

    Those that are most in doubt come first; where nothing was repeated yet, the next fastest. Nothing is to be tried
    again where it is certain which plan is the fastest.
    """
    verdict = compare_plans(times)
    if len(times) < 2 or verdict.certainty >= CERTAIN:
        return []
    others = [plan for plan in range(len(times)) if plan != verdict.fastest]
    enough = (1 - CERTAIN) / len(others)
    doubtful = [plan for plan in others if verdict.doubts[plan] > enough]
    doubtful.sort(key=lambda plan: (-verdict.doubts[plan], median(times[plan])))
    return [verdict.fastest, *doubtful[: max(1, most - 1)]]
