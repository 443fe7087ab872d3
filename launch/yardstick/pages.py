"""README.md and a picture for each set, as in results/published; equal results give equal bytes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from tabulate import tabulate

from launch.yardstick.certainty import known_errors_of, section
from launch.yardstick.measured import GIB, PublishedRun
from launch.yardstick.pictures import draw_pictures
from launch.yardstick.predictors import Predicted, Predictor
from launch.yardstick.results import ReplayedTrace, ScoredSet
from launch.yardstick.scores import memory_errors, time_error
from launch.yardstick.table import LEGEND, percent, table

WORST = 6  # runs
DEGREES = ("tp", "pp", "dp", "micro_batch_size")

INTRODUCTION = """# Predictors beside published measurements

    auto3d yardstick --out results/published  # minutes; more once the models have to be captured

Measured by others on real GPUs; the files, with their sources, are in recipes/published/data. Predictors named auto3d-…
use the recipes of recipes/published; the others are textbook formulas ([how](../../docs/yardstick.md)). Only h100-gpt2
was measured by this project.
"""
TRACES_TEXT = """## Traced trainings

Every operation of two real trainings under 1F1B (straggler analysis of ByteDance, Lin et al., OSDI 2025; Apache-2.0):
the measured times of the operations go through our simulator, and the step time comes out. No cost model, nothing
fitted. The authors' own replay is 1.9 and 0.7 % off. Some time between two records is a rank's own work, such as
copying gradients before the reduce-scatter; the least among the data-parallel copies of a stage counts as such.
"""


def write_pages(sets: Sequence[ScoredSet], traces: Sequence[ReplayedTrace], folder: Path) -> list[Path]:
    """Write README.md and a picture per set to ``folder``; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [INTRODUCTION, table(sets, traces, "github"), "", LEGEND, ""]
    if known := known_errors_of(sets):
        parts.append(section(known))
    files = []
    for scored in sets:
        files.append(folder / f"{scored.measured.name}.png")
        draw_pictures(scored, files[-1])
        parts += [*_section(scored)]
    if traces:
        rows = [
            (trace.name, trace.steps, percent(trace.error, 2), percent(trace.recorded_error, 2)) for trace in traces
        ]
        headings = ["trace", "steps", "error", "from recorded times alone"]
        parts += [TRACES_TEXT, tabulate(rows, headings, "github", disable_numparse=True), ""]
    page = folder / "README.md"
    page.write_text("\n".join(parts).rstrip() + "\n")
    return [page, *files]


def _section(scored: ScoredSet) -> Iterator[str]:
    measured, (best, *_) = scored.measured, scored.predicted
    yield f"## {measured.title}\n"
    yield f"{measured.source}; licence: {measured.licence}. System: {measured.system}. {measured.words}".rstrip() + "\n"
    yield f"![predicted against measured]({measured.name}.png)\n"
    yield f"{best.name} by degree:\n"
    yield _by_degree(scored, best) + "\n"
    for what, rows in (("times", _worst_times(scored, best)), ("peaks of memory", _worst_peaks(scored, best))):
        if rows:
            yield f"Its worst {what}:\n"
            yield tabulate(rows, ["", "predicted", "measured", "error"], "github", disable_numparse=True) + "\n"
    if measured.open:
        yield f"Not understood: {measured.open}\n"


def _by_degree(scored: ScoredSet, best: Predictor) -> str:
    """Mean errors of runs that share a degree or a micro-batch size."""
    rows = []
    for name in DEGREES:
        for value in sorted({int(run.row[name]) for run in scored.runs}):
            pairs = [pair for pair in _pairs(scored, best) if int(pair[0].row[name]) == value]
            times = [
                error for run, prediction in pairs if run.timed and (error := time_error(run, prediction)) is not None
            ]
            peaks = [error for run, prediction in pairs for error in memory_errors(run, prediction)]
            if times or peaks:
                shown = [percent(mean(errors)) if errors else "–" for errors in (times, peaks)]
                rows.append((f"{name} {value}", len(times), shown[0], len(peaks), shown[1]))
    return tabulate(rows, ["", "runs", "time", "ranks", "memory"], "github", disable_numparse=True)


def _worst_times(scored: ScoredSet, best: Predictor) -> list[tuple[str, str, str, str]]:
    times = [
        (run, prediction.seconds, run.seconds)
        for run, prediction in _pairs(scored, best)
        if run.timed and prediction.seconds is not None and run.seconds is not None
    ]
    return [
        (run.words, f"{predicted:.3f} s", f"{measured:.3f} s", f"{predicted / measured - 1:+.1%}")
        for run, predicted, measured in _worst(times)
    ]


def _worst_peaks(scored: ScoredSet, best: Predictor) -> list[tuple[str, str, str, str]]:
    worst: list[tuple[PublishedRun, float, float]] = []
    for run, prediction in _pairs(scored, best):
        peaks = [(peak, measured) for device, measured in run.memory if (peak := prediction.peak(device)) is not None]
        if peaks:
            worst.append((run, *max(peaks, key=lambda pair: abs(pair[0] / pair[1] - 1))))
    return [
        (run.words, f"{predicted / GIB:.2f} GiB", f"{measured / GIB:.2f} GiB", f"{predicted / measured - 1:+.1%}")
        for run, predicted, measured in _worst(worst)
    ]


def _worst(runs: Sequence[tuple[PublishedRun, float, float]]) -> list[tuple[PublishedRun, float, float]]:
    return sorted(runs, key=lambda run: -abs(run[1] / run[2] - 1))[:WORST]


def _pairs(scored: ScoredSet, best: Predictor) -> list[tuple[PublishedRun, Predicted]]:
    return list(zip(scored.runs, scored.predicted[best], strict=True))
