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
    rows = [_row(scored, part) for scored in sets for part in scored.parts]
    rows += [
        (trace.name, "simulator", f"{trace.steps}", percent(trace.error, 2), *[percent(float("nan"))] * 7)
        for trace in traces
    ]
    text = tabulate(rows, HEADINGS, form, disable_numparse=True)
    fitted = dict.fromkeys(
        f"{MARK} {scored.measured.name}: {words}."
        for scored in sets
        for part, words in scored.measured.fitted.items()
        if any(scored_part.fitted and scored_part.part == part for scored_part in scored.parts)
    )
    return "\n\n".join([text, *fitted])


def percent(share: float, digits: int = 1) -> str:
    """A share in per cent; – for nan."""
    return "–" if isnan(share) else f"{100 * share:.{digits}f} %"


def _row(scored: ScoredSet, part: ScoredPart) -> tuple[str, ...]:
    scores = part.scores
    without = f" ({scores.unpredicted})" if scores.unpredicted else ""
    return (
        _place(scored, part.part),
        part.predictor.name + (f" {MARK}" if part.fitted else ""),
        f"{scores.timed}{without}",
        percent(scores.time_error),
        percent(scores.relative_error),
        percent(scores.memory_error),
        "–" if isnan(scores.spearman) else f"{scores.spearman:.3f}",
        percent(scores.regret),
        percent(scores.precision),
        percent(scores.recall),
        percent(scores.accepted),
    )


def _place(scored: ScoredSet, part: str) -> str:
    return scored.measured.name + (f": {part}" if part else "")
