"""Measurements -> tables: rows are records with names, best first; as Markdown, CSV, JSON and on the terminal."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from tabulate import tabulate

from auto3d.runtime.measurement import Measurement, Status
from launch.recipe import LoadedRecipe
from launch.store import StoreError, finished_trials, write_whole

RESULTS = Path("results")

HEADINGS = {
    "dp": "dp",
    "tp": "tp",
    "pp": "pp",
    "micro_batch_size": "micro-\nbatch",
    "schedule": "schedule",
    "iteration_s": "s per\niteration",
    "spread_s": "spread\n(s)",
    "samples_per_s": "samples\nper s",
    "tokens_per_s": "tokens\nper s",
    "peak_bytes": "peak\n(MiB)",
    "status": "status",
}


def rows(recipe: LoadedRecipe) -> list[dict[str, Any]]:
    """One record per finished trial of ``recipe``, fastest first; raises StoreError if there is none."""
    measurements = [measurement for _, measurement in finished_trials(recipe)]
    if not measurements:
        raise StoreError(f"{recipe.name}: no finished trial; `auto3d sweep {recipe.name}` runs them")
    return [_row(measurement) for measurement in sorted(measurements, key=_rank)]


def best(recipe: LoadedRecipe) -> Measurement | None:
    """The fastest trial that is ok."""
    measurements = sorted((measurement for _, measurement in finished_trials(recipe)), key=_rank)
    return measurements[0] if measurements and measurements[0].status is Status.OK else None


def write(recipe: LoadedRecipe) -> list[Path]:
    """Write results/<recipe>/table.md and table.csv and, if a trial is ok, best_plan.json; returns the files."""
    folder = RESULTS / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    records = rows(recipe)
    contents = {"table.md": _markdown(recipe, records), "table.csv": _csv(records)}
    fastest = best(recipe)
    if fastest is not None:
        contents["best_plan.json"] = fastest.plan.to_json() + "\n"
    for name, text in contents.items():
        write_whole(folder / name, text)
    return [folder / name for name in contents]


def terminal(recipe: LoadedRecipe) -> str:
    """The table for a terminal of 80 columns, with the same caption as the Markdown one."""
    return f"{_table(rows(recipe), list(HEADINGS.values()), 'simple')}\n\n{fill(caption(recipe), 80)}"


def caption(recipe: LoadedRecipe) -> str:
    """How the numbers were made, on what, and how to make them again."""
    values = recipe.values
    measured = [measurement for _, measurement in finished_trials(recipe) if measurement.environment]
    model = values.model.architecture or values.model.factory
    text = (
        f"Measured, not predicted: {model}, global batch {values.training.global_batch}; median of "
        f"{values.measure.iterations} iterations after {values.measure.warmup_iterations} of warm-up, "
        "spread from fastest to slowest, peak memory of the fullest rank"
    )
    if values.cluster.device == "cpu":
        text += " beyond its interpreter and libraries"
    for environment in {measurement.environment for measurement in measured}:
        text += (
            f"; on {environment.device}, {environment.cores} cores, torch {environment.torch}, "
            f"transformers {environment.transformers}, Python {environment.python}"
        )
    days = sorted({measurement.finished[:10] for measurement in measured})
    text += f"; {' to '.join(dict.fromkeys([days[0], days[-1]]))}" if days else ""
    return f"{text}. Again: make sweep RECIPE={recipe.name}"


def _rank(measurement: Measurement) -> tuple[int, float]:
    statuses = list(Status)
    return statuses.index(measurement.status), measurement.median_s if measurement.iteration_s else 0.0


def _row(measurement: Measurement) -> dict[str, Any]:
    """Seconds and bytes; figures of a trial that is not ok are None."""
    plan = measurement.plan
    ok = measurement.status is Status.OK
    return {
        "dp": plan.dp,
        "tp": plan.tp,
        "pp": plan.pp,
        "micro_batch_size": plan.micro_batch_size,
        "schedule": plan.schedule,
        "iteration_s": measurement.median_s if ok else None,
        "spread_s": measurement.spread_s if ok else None,
        "samples_per_s": measurement.samples_per_s if ok else None,
        "tokens_per_s": measurement.tokens_per_s if ok and measurement.tokens_per_sample else None,
        "peak_bytes": max(measurement.peak_bytes) if ok else None,
        "status": str(measurement.status),
    }


def _cells(record: dict[str, Any]) -> list[str]:
    """The record as people read it."""
    forms = {
        "iteration_s": "{:.3f}",
        "spread_s": "{:.3f}",
        "samples_per_s": "{:.1f}",
        "tokens_per_s": "{:,.0f}",
    }
    shown = {**record, "peak_bytes": None if record["peak_bytes"] is None else f"{record['peak_bytes'] / 2**20:.0f}"}
    return ["-" if shown[name] is None else forms.get(name, "{}").format(shown[name]) for name in HEADINGS]


def _markdown(recipe: LoadedRecipe, records: Sequence[dict[str, Any]]) -> str:
    headings = [heading.replace("-\n", "-").replace("\n", " ") for heading in HEADINGS.values()]
    return f"{_table(records, headings, 'github')}\n\n{caption(recipe)}\n"


def _table(records: Sequence[dict[str, Any]], headings: Sequence[str], form: str) -> str:
    align = ["left" if name in ("schedule", "status") else "right" for name in HEADINGS]
    cells = [_cells(record) for record in records]
    return tabulate(cells, headings, tablefmt=form, colalign=align, disable_numparse=True)


def _csv(records: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(HEADINGS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
