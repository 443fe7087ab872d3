"""Predicted times corrected by a sweep's own trials, where the machine has no profile."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import mean, stdev

LEAST = 2  # other trials that a correction needs
_QUANTILE = 0.9  # of Student's distribution: four of five values lie between this quantile and its negative


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """A predicted time, times the mean ratio of measured and predicted times of other plans."""

    seconds: float
    interval_s: tuple[float, float]  # times between which a measurement lies in four cases of five
    trials: int  # number of these other plans


def corrected(predicted: Sequence[float | None], measured: Sequence[float | None]) -> list[Corrected | None]:
    """The correction of the ``predicted`` seconds of each plan by the ``measured`` seconds of all other plans.

    Logarithms of ratios are averaged, and taken to vary from plan to plan with one variance, which Student's
    distribution knows from so many plans. None where a plan has no prediction, or fewer than LEAST others have both.
    """
    pairs = list(zip(predicted, measured, strict=True))
    ratios = {place: log(there / said) for place, (said, there) in enumerate(pairs) if said and there}
    corrections: list[Corrected | None] = []
    for place, said in enumerate(predicted):
        others = [ratio for other, ratio in ratios.items() if other != place]
        corrections.append(None if not said or len(others) < LEAST else _corrected(said, others))
    return corrections


def _corrected(seconds: float, ratios: Sequence[float]) -> Corrected:
    from scipy.special import stdtrit  # imported here because it is slow

    count = len(ratios)
    right = seconds * exp(mean(ratios))
    factor = exp(float(stdtrit(count - 1, _QUANTILE)) * stdev(ratios) * sqrt(1 + 1 / count))
    return Corrected(seconds=right, interval_s=(right / factor, right * factor), trials=count)


WORDS = (
    "corrected: the predicted time, times the mean ratio of measured and predicted times of the other plans whose "
    "trials ended, since the cost model has no profile of this machine; 80 %: between these times four of five "
    "measurements lie, by how much those ratios differ"
)
