"""The errors of our predictions by set, from which intervals are made, and how many measured times those hold."""

import csv
from collections.abc import Sequence
from math import exp, isnan, log, nan, sqrt
from pathlib import Path
from statistics import mean

from tabulate import tabulate

from launch.model.certainty import Certainty, SetErrors, certainty_from, root_mean_square
from launch.yardstick.predictors import Predictor
from launch.yardstick.results import ScoredSet
from launch.yardstick.scores import Pair, grouped
from launch.yardstick.table import percent

TEXT = """## How sure

`auto3d plan` prints for each predicted time between which times a measurement lies in four cases of five. The width is
that of the errors on sets whose figures have the same origin; each set counts the same, with its own bias. *Left out*:
the interval that the other sets of the origin give holds this share of the set's measured times. A set that is alone
of its origin has none. *Between plans*: what remains of the error, in groups of runs among which a planner chooses,
without the mean of each group; two plans whose times differ by less are not told apart.
"""
PLANNING = "auto3d-simulated"  # the predictor of `auto3d plan`


def planning(sets: Sequence[ScoredSet]) -> Predictor | None:
    """The predictor that plans, if it is one of those that were scored."""
    return next((each for one in sets for each in one.predicted if each.name == PLANNING), None)


def set_errors(one: ScoredSet, predictor: Predictor) -> SetErrors | None:
    """The errors of ``predictor`` on ``one``; None where no run has both times."""
    pairs = _timed(one, predictor)
    if not pairs:
        return None
    logs = [[log(run.seconds / each.seconds) for run, each in group] for group in grouped(pairs)]  # type: ignore[operator]
    every = [error for group in logs for error in group]
    apart = [error - mean(group) for group in logs for error in group if len(group) > 1]
    lost = sum(len(group) - 1 for group in logs)  # degrees of freedom
    return SetErrors(
        name=one.measured.name,
        origin=one.measured.origin,
        runs=len(every),
        mean_log=mean(every),
        whole=root_mean_square(every),
        between=sqrt(sum(error**2 for error in apart) / lost) if lost else None,
    )


def coverage(one: ScoredSet, predictor: Predictor, certainty: Certainty) -> float:
    """The share of the measured times of ``one`` that lie in the intervals around the predicted ones."""
    pairs = _timed(one, predictor)
    inside = 0
    for run, each in pairs:
        low, high = certainty.interval(each.seconds)  # type: ignore[arg-type]
        inside += bool(low <= run.seconds <= high)  # type: ignore[operator]
    return inside / len(pairs)


def _timed(one: ScoredSet, predictor: Predictor) -> list[Pair]:
    """The runs whose time counts, with the predictions of it; both times are there."""
    pairs = zip(one.runs, one.predicted[predictor], strict=True)
    return [(run, each) for run, each in pairs if run.timed and run.seconds and each.seconds]


def write_errors(errors: Sequence[SetErrors], file: Path) -> None:
    """Write the file that ``launch.model.certainty`` reads."""
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["set", "origin", "runs", "mean_log", "whole", "between"])
        for one in errors:
            figures = (one.mean_log, one.whole, one.between)
            shown = ("" if value is None else f"{value:.4f}" for value in figures)
            writer.writerow([one.name, one.origin.name, one.runs, *shown])


def section(sets: Sequence[ScoredSet], predictor: Predictor) -> str:
    """The section of the page, with each set's errors and what intervals made without it hold."""
    found = [(one, errors) for one in sets if (errors := set_errors(one, predictor)) is not None]
    rows: list[tuple[object, ...]] = []
    held: list[float] = []
    for one, errors in found:
        others = certainty_from([each for _, each in found if each is not errors], errors.origin)
        share = nan if others is None else coverage(one, predictor, others)
        held += [] if isnan(share) else [share]
        shown = (
            f"{_excess(errors.mean_log):+.0%}",
            percent(_excess(errors.whole)),
            percent(_excess(errors.between)),
            percent(share),
        )
        rows.append((errors.name, str(errors.origin), errors.runs, *shown))
    heads = ["set", "figures", "runs", "measured over predicted", "spread", "between plans", "left out"]
    parts = [TEXT, tabulate(rows, heads, "github", disable_numparse=True)]
    if held:
        parts.append(f"\nMean of the sets: {percent(mean(held))} of the measured times, of 80 % that were wanted.")
    return "\n".join([*parts, ""])


def _excess(logarithm: float | None) -> float:
    """By how much the ratio with this logarithm exceeds 1."""
    return nan if logarithm is None else exp(logarithm) - 1
