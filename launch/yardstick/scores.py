"""Scores of a predictor on published runs: errors, order, regret, and out-of-memory.

An error is |predicted / measured − 1|. Order and regret compare runs of one group, among which a planner chooses.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import nan
from statistics import mean, median

from launch.yardstick.measured import PublishedRun
from launch.yardstick.predictors import Predicted

LEAST_RANKED = 3  # runs of a group whose order counts

Pair = tuple[PublishedRun, Predicted]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores on some runs; nan where there is nothing to score, and the number of values behind each score."""

    time_error: float  # mean
    timed: int
    relative_error: float  # mean, of times relative to the baseline of the group
    relative: int
    memory_error: float  # mean over ranks
    ranks: int
    spearman: float  # mean over groups
    ranked: int
    regret: float  # median over groups
    chosen: int
    precision: float  # share of the runs predicted not to fit that ran out of memory
    recall: float  # share of the runs that ran out of memory that were predicted not to fit
    accepted: float  # share of the runs that ran that were predicted to fit
    judged: int  # runs known to have run or to have run out of memory, with a prediction of memory
    unpredicted: int  # runs with a measured time, but without a predicted time


def scores(runs: Sequence[PublishedRun], predicted: Sequence[Predicted], *, memory_bytes: float | None) -> Scores:
    """The scores of ``predicted`` on ``runs``, in the same order; ``memory_bytes`` is what a device holds."""
    pairs = list(zip(runs, predicted, strict=True))
    ran = [(run, prediction) for run, prediction in pairs if run.seconds is not None]
    comparable = [(run, prediction) for run, prediction in ran if prediction.seconds is not None]
    groups = grouped(ran)
    times = [
        error for run, prediction in comparable if run.timed and (error := time_error(run, prediction)) is not None
    ]
    relative = [error for group in grouped(comparable) for error in relative_errors(group)]
    peaks = [error for run, prediction in pairs for error in memory_errors(run, prediction)]
    orders = [order for group in groups if (order := rank_correlation(group)) is not None]
    regrets = [loss for group in groups if (loss := regret(group)) is not None]
    judged = [
        (run.ran, peak <= memory_bytes)
        for run, prediction in pairs
        if memory_bytes is not None and run.ran is not None and (peak := prediction.peak(None)) is not None
    ]
    return Scores(
        time_error=_mean(times),
        timed=len(times),
        relative_error=_mean(relative),
        relative=len(relative),
        memory_error=_mean(peaks),
        ranks=len(peaks),
        spearman=_mean(orders),
        ranked=len(orders),
        regret=median(regrets) if regrets else nan,
        chosen=len(regrets),
        precision=_share(not did for did, fits in judged if not fits) if _both(judged) else nan,
        recall=_share(not fits for did, fits in judged if not did),
        accepted=_share(fits for did, fits in judged if did),
        judged=len(judged),
        unpredicted=len(ran) - len(comparable),
    )


def time_error(run: PublishedRun, prediction: Predicted) -> float | None:
    """|predicted / measured − 1| of the time; None if either is missing."""
    if run.seconds is None or prediction.seconds is None:
        return None
    return abs(prediction.seconds / run.seconds - 1)


def memory_errors(run: PublishedRun, prediction: Predicted) -> list[float]:
    """|predicted / measured − 1| of the memory of each rank that was measured; empty without a prediction."""
    return [
        abs(peak / measured - 1) for device, measured in run.memory if (peak := prediction.peak(device)) is not None
    ]


def relative_errors(group: Sequence[Pair]) -> list[float]:
    """The errors of the times relative to the baseline's, of a group in which all have both times."""
    base = next(((run.seconds, prediction.seconds) for run, prediction in group if run.baseline), None)
    if base is None:
        return []
    return [
        abs((prediction.seconds / base[1]) / (run.seconds / base[0]) - 1)
        for run, prediction in group
        if not run.baseline and prediction.seconds and run.seconds and base[0] and base[1]
    ]


def rank_correlation(group: Sequence[Pair]) -> float | None:
    """Spearman's rank correlation of predicted and measured times; None for few runs, or if all times are equal."""
    times = [(prediction.seconds, run.seconds) for run, prediction in group if prediction.seconds is not None]
    if len(times) < LEAST_RANKED:
        return None
    first, second = (ranks([pair[side] for pair in times]) for side in (0, 1))  # type: ignore[misc]
    middle = (len(times) - 1) / 2
    shared = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    spread = sum((a - middle) ** 2 for a in first) * sum((b - middle) ** 2 for b in second)
    return shared / spread**0.5 if spread else None


def ranks(values: Sequence[float]) -> list[float]:
    """The place of each value in ascending order, from 0; equal values share the mean of their places."""
    order = sorted(range(len(values)), key=values.__getitem__)
    places = [0.0] * len(values)
    place = 0
    for _, same in groupby(order, key=values.__getitem__):
        tied = list(same)
        for index in tied:
            places[index] = place + (len(tied) - 1) / 2
        place += len(tied)
    return places


def regret(group: Sequence[Pair]) -> float | None:
    """Measured time of the run that the predictor calls fastest, over the fastest run's, minus 1.

    All runs of the group have a measured time; of equal predictions the first counts. None without a choice.
    """
    choices = [(prediction.seconds, run.seconds) for run, prediction in group if prediction.seconds is not None]
    if len(group) < 2 or not choices:
        return None
    _, chosen = min(choices, key=lambda choice: choice[0])
    return chosen / min(run.seconds for run, _ in group) - 1  # type: ignore[operator, type-var]


def grouped(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """``pairs`` by the group of their runs, in order of the first run of each group."""
    groups: dict[tuple[str, ...], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair[0].group, []).append(pair)
    return list(groups.values())


def _both(judged: Sequence[tuple[bool, bool]]) -> bool:
    """Whether there are runs out of memory among ``judged``, and others."""
    return len({did for did, _ in judged}) == 2


def _mean(values: Sequence[float]) -> float:
    return mean(values) if values else nan


def _share(flags: Iterable[bool]) -> float:
    return _mean([float(flag) for flag in flags])
