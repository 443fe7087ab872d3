"""Measurements -> tables, fastest first: as Markdown, CSV, JSON, and for the terminal."""

import csv
import io
import shlex
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from tabulate import tabulate

from auto3d.plan import NO_OVERLAP, Plan
from auto3d.runtime.measurement import BYTES, Measurement, Status
from auto3d.schedule import schedule_of, write_schedule
from launch.recipe.load import LoadedRecipe, load
from launch.recipe.settings import emulation
from launch.recipe.words import counted
from launch.store.files import write_whole
from launch.store.trials import StoreError, last_sweep, measurements_of, settings_digest

TABLES = Path("tables")  # tables of users; git ignores this folder
REFERENCE = Path("results")  # committed tables

HEADINGS = {
    "dp": "dp",
    "tp": "tp",
    "pp": "pp",
    "micro_batch_size": "micro-\nbatch",
    "schedule": "schedule",
    "recompute": "recomputed",
    "replicas": "replicas\nof stages",
    "shard_optimizer": "ZeRO-1",
    "sequence_parallel": "sequence-\nparallel",
    "tensor_overlap": "tensor\noverlap",
    "iteration_s": "s per\niteration",
    "spread_s": "spread\n(s)",
    "samples_per_s": "samples\nper s",
    "tokens_per_s": "tokens\nper s",
    "peak_bytes": "peak\n(MiB)",
    "used_bytes": "used\n(MiB)",
    "status": "status",
}


@dataclass(frozen=True)
class Results:
    """The measurements of a sweep."""

    recipe: LoadedRecipe  # with the overrides of the sweep
    measurements: list[Measurement]  # one per ended trial, fastest first
    trials: int  # number of all trials of the sweep
    left_out: int  # number of plans beyond search.max_trials


def results_of(recipe: LoadedRecipe) -> Results:
    """The results of the last sweep of ``recipe``; overrides, if there are any, must be those of that sweep.

    Raises StoreError if that sweep had other settings, or if no trial has ended.
    """
    sweep = last_sweep(recipe)
    if sweep is None:
        raise StoreError(f"{recipe.name}: no finished trial; to run them: {recipe.command('sweep')}")
    present = recipe if recipe.overrides else load(recipe.written, sweep.overrides)
    if settings_digest(present) != sweep.settings:
        change = f"its last sweep had other settings (overrides: {shlex.join(sweep.overrides) or 'none'})"
        if not recipe.overrides:
            change = "the recipe has changed since its last sweep"
        raise StoreError(f"{recipe.name}: no finished trial: {change}; to run them: {present.command('sweep')}")
    return results(present, measurements_of(present, sweep), len(sweep.trials), sweep.left_out)


def results(recipe: LoadedRecipe, measurements: Sequence[Measurement], trials: int, left_out: int) -> Results:
    """The results of a sweep; raises StoreError if there is no measurement."""
    if not measurements:
        raise StoreError(f"{recipe.name}: no finished trial; to run them: {recipe.command('sweep')}")
    return Results(recipe, sorted(measurements, key=_rank), trials, left_out)


def rows(results: Results) -> list[dict[str, Any]]:
    """One record per finished trial."""
    return [_row(measurement) for measurement in results.measurements]


def best(results: Results) -> Measurement | None:
    """The measurement of the fastest trial that is ok, if one is."""
    return next((measurement for measurement in results.measurements if measurement.status is Status.OK), None)


def write(results: Results, folder: Path | None = None) -> list[Path]:
    """Write table.md and table.csv and, if a trial succeeded, best_plan.json; returns the files.

    They go to ``folder``, or to tables/<recipe>.
    """
    records = rows(results)
    contents = {"table.md": _markdown(results, records, folder), "table.csv": _csv(records)}
    folder = folder or TABLES / results.recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    fastest = best(results)
    if fastest is not None:
        contents["best_plan.json"] = fastest.plan.to_json() + "\n"
    for name, text in contents.items():
        write_whole(folder / name, text)
    return [folder / name for name in contents]


def terminal(results: Results) -> str:
    """The table for a terminal of 80 columns, with the caption of the Markdown table."""
    # The command at the end keeps a line of its own, so that it can be copied.
    text, again = fill(provenance(results), 80), _again(results.recipe)
    return f"{_table(rows(results), 'simple')}\n\n{text}\nAgain: {again}"


def caption(results: Results, folder: Path | None = None) -> str:
    """How and on what the numbers were measured, and the command that measures them again, into ``folder`` if given."""
    return f"{provenance(results)} Again: `{_again(results.recipe, folder)}`"


def provenance(results: Results) -> str:
    """How and on what the numbers were measured."""
    values = results.recipe.values
    model = f"{values.model.architecture or values.model.factory}, global batch {values.training.global_batch}"
    how = (
        f"median of {counted(values.measure.iterations, 'iteration')} after {values.measure.warmup_iterations} of "
        "warm-up, spread from fastest to slowest"
    )
    if emulated := emulation(values):
        changed = {name: value for name, value in asdict(emulated).items() if value is not None}
        but = f", except {', '.join(f'{name} {value}' for name, value in changed.items())}" if changed else ""
        text = (
            f"Emulated, not measured on real devices: {model}; messages and gradient syncs are real, operations "
            "compute nothing and only take their time; times come from the analytic cost model, sizes are the true "
            f"ones{but}; {how}"
        )
    else:
        text = f"Measured, not predicted: {model}; {how}, peak memory of the fullest rank"
        text += (
            " beyond its interpreter and libraries"
            if values.cluster.device == "cpu"
            else ": of its tensors, and used on its device, context and NCCL included"
        )
    environments = {one.environment for one in results.measurements if one.environment}
    for environment in sorted(environments, key=lambda one: (one.host, str(one))):
        text += (
            f"; on {environment.host}: {environment.computer}, torch {environment.torch}, "
            f"transformers {environment.transformers}, Python {environment.python}"
        )
    days = sorted({one.finished[:10] for one in results.measurements if one.finished})
    text += f"; {' to '.join(dict.fromkeys([days[0], days[-1]]))}" if days else ""
    ended = len(results.measurements)
    if ended < results.trials:
        missing = results.trials - ended
        text += f"; {missing} of {counted(results.trials, 'trial')} {'has' if missing == 1 else 'have'} not run"
    if results.left_out:
        plans = counted(results.left_out, "more plan is left out", "more plans are left out")
        text += f"; {plans} by search.max_trials = {values.search.max_trials}"
    return f"{text}."


def _again(recipe: LoadedRecipe, folder: Path | None = None) -> str:
    if recipe.shipped and not recipe.overrides and folder in (None, REFERENCE / recipe.name):
        return f"make {'sweep' if folder is None else 'reference'} RECIPE={recipe.name}"
    sweep = recipe.command("sweep")
    return sweep if folder is None else f"{sweep} && {recipe.command('table', '--output', str(folder))}"


def _rank(measurement: Measurement) -> tuple[int, float]:
    statuses = list(Status)
    return statuses.index(measurement.status), measurement.median_s if measurement.iteration_s else 0.0


def _row(measurement: Measurement) -> dict[str, Any]:
    """The record of one trial, in seconds and bytes; figures of a trial that is not ok are None."""
    plan = measurement.plan
    ok = measurement.status is Status.OK
    return {
        "dp": plan.dp,
        "tp": plan.tp,
        "pp": plan.pp,
        "micro_batch_size": plan.micro_batch_size,
        "schedule": write_schedule(plan.schedule, {k: v for k, v in plan.schedule_options.items() if k != "recompute"}),
        "recompute": _recomputed(plan),
        "replicas": "+".join(str(stage.replicas) for stage in plan.stages),
        "shard_optimizer": plan.shard_optimizer,
        "sequence_parallel": plan.sequence_parallel,
        "tensor_overlap": plan.tensor_overlap,
        "iteration_s": measurement.median_s if ok else None,
        "spread_s": measurement.spread_s if ok else None,
        "samples_per_s": measurement.samples_per_s if ok else None,
        "tokens_per_s": measurement.tokens_per_s if ok and measurement.tokens_per_sample else None,
        **{name: max(getattr(measurement, name), default=None) if ok else None for name in BYTES},
        "status": str(measurement.status),
        "devices": "emulated" if measurement.emulated else "real",
        "error": measurement.error,
        "plan": asdict(plan),
    }


def _recomputed(plan: Plan) -> str:
    """The fraction of all operations that are recomputed."""
    stages = [plan.stages[stage] for stage in schedule_of(plan).recompute]
    again = sum(_count(stage.operations) - _count(stage.kept) for stage in stages)
    return f"{again / sum(_count(stage.operations) for stage in plan.stages):.0%}" if again else "none"


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(last - first for first, last in ranges)


def _columns(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Name -> heading of the columns in which trials of this table can differ."""
    columns = dict(HEADINGS)
    if all(record["recompute"] == "none" for record in records):  # true in most sweeps
        del columns["recompute"]
    if all(set(record["replicas"]) <= {"1", "+"} for record in records):
        del columns["replicas"]
    if not any(record["shard_optimizer"] for record in records):
        del columns["shard_optimizer"]
    if not any(record["sequence_parallel"] for record in records):
        del columns["sequence_parallel"]
    if all(record["tensor_overlap"] == NO_OVERLAP for record in records):
        del columns["tensor_overlap"]
    if all(record["used_bytes"] is None for record in records):  # CPUs do not report it
        del columns["used_bytes"]
    if any(record["devices"] == "emulated" for record in records):
        columns["devices"] = "devices"  # every row names its devices
    return columns


def _cells(record: dict[str, Any], columns: Collection[str]) -> list[str]:
    """The cells of a record, rounded for reading."""
    forms = {
        "iteration_s": "{:.3f}",
        "spread_s": "{:.3f}",
        "samples_per_s": "{:.1f}",
        "tokens_per_s": "{:,.0f}",
        **dict.fromkeys(BYTES, "{:.0f}"),
    }
    in_mib = {name: record[name] / 2**20 for name in BYTES if record[name] is not None}
    shown = {**record, **in_mib}
    return ["-" if shown[name] is None else forms.get(name, "{}").format(shown[name]) for name in columns]


def _markdown(results: Results, records: Sequence[dict[str, Any]], folder: Path | None) -> str:
    return f"{_table(records, 'github')}\n\n{caption(results, folder)}\n"


def _table(records: Sequence[dict[str, Any]], form: str) -> str:
    columns = _columns(records)
    align = ["left" if name in ("schedule", "tensor_overlap", "status", "devices") else "right" for name in columns]
    cells = [_cells(record, columns) for record in records]
    headings = list(columns.values())
    if form == "github":
        headings = [heading.replace("-\n", "-").replace("\n", " ") for heading in headings]
    return tabulate(cells, headings, tablefmt=form, colalign=align, disable_numparse=True)


def _csv(records: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(_columns(records)), lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
