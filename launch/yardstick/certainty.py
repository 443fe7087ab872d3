"""The errors of our predictions by set, from which intervals are made, and how many measured times those hold."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, isnan, log, nan, sqrt
from pathlib import Path
from statistics import mean

from tabulate import tabulate

from launch.model.certainty import Certainty, Origin, SetErrors, certainty_from, root_mean_square
from launch.yardstick.left_out import CHANGED, LEFT_OUT
from launch.yardstick.predictors import Predictor
from launch.yardstick.results import ScoredSet
from launch.yardstick.scores import Pair, grouped
from launch.yardstick.table import percent

TEXT = """## How sure

`auto3d plan` prints for each predicted time between which times a measurement lies in four cases of five. The width
is that of the errors on sets whose figures have the same origin; each set counts the same, with its own bias. A name
with *left out* is the set as auto3d-left-out predicts it, without any figure that was fitted to its times: so far is
a device off that nobody has measured. *Inside*: the interval that the other sets of the origin give holds this share
of the set's measured times. A set that is alone of its origin has none. *Between plans*: what remains of the error,
in groups of runs among which a planner chooses, without the mean of each group; two plans whose times differ by less
are not told apart.
"""
PLANNING = "auto3d-simulated"  # the predictor of `auto3d plan`


@dataclass(frozen=True)
class KnownErrors:
    """What intervals learn from a set, and the predictions that were made for it."""

    scored: ScoredSet
    predictor: Predictor
    errors: SetErrors


def known_errors_of(sets: Sequence[ScoredSet]) -> list[KnownErrors]:
    """The errors from which intervals are made: of the predictor that plans and, as if from a data sheet, of the
    predictor without what was fitted to the set, where that is another. Empty unless both were scored."""
    errors: list[KnownErrors] = []
    for scored in sets:
        by_name = {predictor.name: predictor for predictor in scored.predicted}
        if not {PLANNING, LEFT_OUT} <= by_name.keys():
            continue
        changed = scored.measured.name in CHANGED
        if not (changed and scored.measured.origin is Origin.DATA_SHEET):
            errors += _known(scored, by_name[PLANNING], scored.measured.name, scored.measured.origin)
        if changed:
            errors += _known(scored, by_name[LEFT_OUT], f"{scored.measured.name}, left out", Origin.DATA_SHEET)
    return errors


def _known(scored: ScoredSet, predictor: Predictor, name: str, origin: Origin) -> list[KnownErrors]:
    errors = set_errors(scored, predictor)
    return [] if errors is None else [KnownErrors(scored, predictor, replace(errors, name=name, origin=origin))]


def set_errors(scored: ScoredSet, predictor: Predictor) -> SetErrors | None:
    """The errors of ``predictor`` on ``scored``; None where no run has both times."""
    pairs = _timed(scored, predictor)
    if not pairs:
        return None
    logs = [[log(run.seconds / prediction.seconds) for run, prediction in group] for group in grouped(pairs)]  # type: ignore[operator]
    every = [error for group in logs for error in group]
    apart = [error - mean(group) for group in logs for error in group if len(group) > 1]
    lost = sum(len(group) - 1 for group in logs)  # degrees of freedom
    return SetErrors(
        name=scored.measured.name,
        origin=scored.measured.origin,
        runs=len(every),
        mean_log=mean(every),
        whole=root_mean_square(every),
        between=sqrt(sum(error**2 for error in apart) / lost) if lost else None,
    )


def coverage(scored: ScoredSet, predictor: Predictor, certainty: Certainty) -> float:
    """The share of the measured times of ``scored`` that lie in the intervals around the predicted ones."""
    pairs = _timed(scored, predictor)
    inside = 0
    for run, prediction in pairs:
        low, high = certainty.interval(prediction.seconds)  # type: ignore[arg-type]
        inside += bool(low <= run.seconds <= high)  # type: ignore[operator]
    return inside / len(pairs)


def _timed(scored: ScoredSet, predictor: Predictor) -> list[Pair]:
    """The runs whose time counts, with their predictions; both times are there."""
    pairs = zip(scored.runs, scored.predicted[predictor], strict=True)
    return [(run, prediction) for run, prediction in pairs if run.timed and run.seconds and prediction.seconds]


def write_errors(errors: Sequence[SetErrors], file: Path) -> None:
    """Write the file that ``launch.model.certainty`` reads."""
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["set", "origin", "runs", "mean_log", "whole", "between"])
        for entry in errors:
            figures = (entry.mean_log, entry.whole, entry.between)
            shown = ("" if value is None else f"{value:.4f}" for value in figures)
            writer.writerow([entry.name, entry.origin.name, entry.runs, *shown])


def section(known: Sequence[KnownErrors]) -> str:
    """The section of the page, with each set's errors and what intervals made without it hold."""
    rows: list[tuple[object, ...]] = []
    held: list[float] = []
    for known_errors in known:
        errors = known_errors.errors
        others = certainty_from([other.errors for other in known if other is not known_errors], errors.origin)
        share = nan if others is None else coverage(known_errors.scored, known_errors.predictor, others)
        held += [] if isnan(share) else [share]
        shown = (
            f"{_excess(errors.mean_log):+.0%}",
            percent(_excess(errors.whole)),
            percent(_excess(errors.between)),
            percent(share),
        )
        rows.append((errors.name, str(errors.origin), errors.runs, *shown))
    heads = ["set", "figures", "runs", "measured over predicted", "spread", "between plans", "inside"]
    parts = [TEXT, tabulate(rows, heads, "github", disable_numparse=True)]
    if held:
        parts.append(f"\nMean of the sets: {percent(mean(held))} of the measured times, of 80 % that were wanted.")
    return "\n".join([*parts, ""])


def _excess(logarithm: float | None) -> float:
    """By how much the ratio with this logarithm exceeds 1."""
    return nan if logarithm is None else exp(logarithm) - 1
