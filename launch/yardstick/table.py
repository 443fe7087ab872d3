"""The table of the yardstick: sets × predictors."""

from collections.abc import Sequence
from math import isnan

from tabulate import tabulate

from launch.yardstick.results import ReplayedTrace, ScoredPart, ScoredSet

MARK = "†"
HEADINGS = (
    "set", "predictor", "runs", "time", "relative", "memory", "Spearman", "regret", "OOM precision", "OOM recall",
    "accepted",
)  # fmt: skip
LEGEND = (
    "time, memory: mean of |predicted / measured − 1|, over runs and over measured ranks. relative: that of times "
    "divided by the time of 1F1B. Spearman: mean rank correlation of times within groups of runs among which a planner "
    "chooses (equal model, devices and batch). regret: measured time of the run that is predicted fastest, over that "
    "of the fastest, minus 1; median over groups. OOM precision: share of the runs predicted not to fit that ran out "
    "of memory; recall: share of those out of memory that were predicted not to fit; accepted: share of the runs that "
    "ran and were predicted to fit. runs: those whose time counts; in brackets, runs with a time but no prediction."
)


def table(sets: Sequence[ScoredSet], traces: Sequence[ReplayedTrace], form: str = "simple") -> str:
    """The table in a form of tabulate, and below it what is marked as fitted."""
    rows = [_row(one, part) for one in sets for part in one.parts]
    rows += [
        (one.name, "simulator", f"{one.steps}", percent(one.error, 2), *[percent(float("nan"))] * 7) for one in traces
    ]
    text = tabulate(rows, HEADINGS, form, disable_numparse=True)
    fitted = dict.fromkeys(
        f"{MARK} {one.measured.name}: {words}."
        for one in sets
        for part, words in one.measured.fitted.items()
        if any(each.fitted and each.part == part for each in one.parts)
    )
    return "\n\n".join([text, *fitted])


def percent(share: float, digits: int = 1) -> str:
    """A share in per cent; – for nan."""
    return "–" if isnan(share) else f"{100 * share:.{digits}f} %"


def _row(one: ScoredSet, part: ScoredPart) -> tuple[str, ...]:
    found = part.scores
    without = f" ({found.unpredicted})" if found.unpredicted else ""
    return (
        _place(one, part.part),
        part.predictor.name + (f" {MARK}" if part.fitted else ""),
        f"{found.timed}{without}",
        percent(found.time_error),
        percent(found.relative_error),
        percent(found.memory_error),
        "–" if isnan(found.spearman) else f"{found.spearman:.3f}",
        percent(found.regret),
        percent(found.precision),
        percent(found.recall),
        percent(found.accepted),
    )


def _place(one: ScoredSet, part: str) -> str:
    return one.measured.name + (f": {part}" if part else "")
