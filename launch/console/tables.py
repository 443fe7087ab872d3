"""Measurements -> tables, fastest first: as Markdown, CSV, JSON, LaTeX, and for the terminal."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import fill
from typing import Any

from tabulate import tabulate

from auto3d.plan import AUTO3D, Plan
from auto3d.runtime.measurement import Measurement, Status
from auto3d.words import counted
from launch.console.records import aligned, cells, columns_of, compare, csv_text, record, same_choices, what_rates_are
from launch.model.corrected import WORDS, corrected
from launch.recipe.load import LoadedRecipe, load
from launch.recipe.settings import emulation
from launch.store.files import write_whole
from launch.store.trials import StoreError, last_sweep, measurement_of, measurements_of, settings_digest

TABLES = Path("tables")  # tables of users; git ignores this folder
REFERENCE = Path("results")  # committed tables
_REASONS = ("why_not", "why_not_logged")  # columns that a terminal shows as lines under the table


@dataclass(frozen=True)
class Results:
    """The measurements of a sweep."""

    recipe: LoadedRecipe  # with the overrides of the sweep
    measurements: list[Measurement]  # a row per ended trial, fastest first
    trials: int  # number of all trials of the sweep
    left_out: int  # number of candidates beyond search.max_trials
    predicted_s: Mapping[Plan, float] = field(default_factory=dict)  # seconds per iteration of plans that have any
    predicted_on: str = ""  # the basis of these predictions
    profiled: bool = True  # whether they rest on a profile of the machine; else its trials correct them
    candidates: Mapping[Plan, Mapping[str, Any]] = field(default_factory=dict)  # fields of each plan's Candidate
    baseline: str = ""  # pairs key=value that name the row to which the others are compared


def results_of(recipe: LoadedRecipe, baseline: str = "") -> Results:
    """The results of the last sweep of ``recipe``; overrides, if there are any, must be the overrides of that sweep.

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
    ended = {
        name: measurement.plan for name in sweep.trials if (measurement := measurement_of(present, name)) is not None
    }
    return results(
        present,
        measurements_of(present, sweep),
        len(sweep.trials),
        sweep.left_out,
        predicted_s={ended[name]: seconds for name, seconds in sweep.predicted_s.items() if name in ended},
        predicted_on=sweep.predicted_on,
        profiled=sweep.profiled,
        candidates={ended[name]: candidate for name, candidate in sweep.candidates.items() if name in ended},
        baseline=baseline,
    )


def results(
    recipe: LoadedRecipe, measurements: Sequence[Measurement], trials: int, left_out: int, **more: Any
) -> Results:
    """The results of a sweep, with ``more`` of their fields; raises StoreError if there is no measurement."""
    if not measurements:
        raise StoreError(f"{recipe.name}: no finished trial; to run them: {recipe.command('sweep')}")
    return Results(recipe, sorted(measurements, key=_rank), trials, left_out, **more)


def rows(results: Results) -> list[dict[str, Any]]:
    """One record per finished trial; raises InputError if the baseline is not one row whose trial succeeded."""
    records = [
        record(
            results.recipe,
            measurement,
            results.predicted_s.get(measurement.plan),
            results.candidates.get(measurement.plan),
        )
        for measurement in results.measurements
    ]
    if not results.profiled:
        right = corrected([row["predicted_s"] for row in records], [row["iteration_s"] for row in records])
        for row, correction in zip(records, right, strict=True):
            row["corrected_s"] = None if correction is None else correction.seconds
            row["corrected_interval_s"] = None if correction is None else [*correction.interval_s]
    if results.baseline:
        compare(records, results.baseline)
    return records


def best(results: Results) -> Measurement | None:
    """The measurement of the fastest trial of auto3d itself that is ok, if any is; `auto3d train` can use its plan."""
    ok = (measurement for measurement in results.measurements if measurement.status is Status.OK)
    return next((measurement for measurement in ok if measurement.plan.engine == AUTO3D), None)


def write(results: Results, folder: Path | None = None, *, latex: bool = False) -> list[Path]:
    """Write table.md, table.csv, with ``latex`` table.tex and, if a trial succeeded, best_plan.json; returns the files.

    They go to ``folder``, or to tables/<recipe>.
    """
    records = rows(results)
    contents = {
        "table.md": f"{_table(records, 'github')}\n\n{caption(results, folder)}\n",
        "table.csv": csv_text(records, columns_of(records)),
    }
    if latex:
        contents["table.tex"] = _latex(results, records, folder)
    folder = folder or TABLES / results.recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    fastest = best(results)
    if fastest is not None:
        contents["best_plan.json"] = fastest.plan.to_json() + "\n"
    for name, text in contents.items():
        write_whole(folder / name, text)
    return [folder / name for name in contents]


def terminal(results: Results) -> str:
    """The table for a terminal, with the caption of the Markdown table.

    Choices that all rows have in common are in a line of their own, which keeps the table narrow.
    """
    records = rows(results)
    same = same_choices(records)
    shown = {name: heading for name, heading in columns_of(records).items() if name not in {*same, *_REASONS}}
    common = " ".join(f"{name}={same[name]}" for name in columns_of(records) if name in same)
    # The command at the end keeps a line of its own, so that it can be copied.
    text, again = fill(provenance(results), 80), _again(results)
    table = _table(records, "simple", shown) + (f"\n\nAll rows: {common}" if common else "")
    reasons = [fill(f"infeasible: {row['why_not']}", 80) for row in records if row["why_not"]]
    not_logged = dict.fromkeys(row["why_not_logged"] for row in records if row["why_not_logged"])
    reasons += [fill(f"not logged: {reason}", 80) for reason in not_logged]
    return "\n\n".join([table, *reasons, f"{text}\nAgain: {again}"])


def caption(results: Results, folder: Path | None = None) -> str:
    """How and on what the numbers were measured, and the command that measures them again, into ``folder`` if given."""
    return f"{provenance(results)} Again: `{_again(results, folder)}`"


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
    text += _figures(results)
    environments = {measurement.environment for measurement in results.measurements if measurement.environment}
    for environment in sorted(environments, key=lambda environment: (environment.host, str(environment))):
        text += f"; on {environment.host}: {environment.computer_and_software}"
    days = sorted({measurement.finished[:10] for measurement in results.measurements if measurement.finished})
    text += f"; {' to '.join(dict.fromkeys([days[0], days[-1]]))}" if days else ""
    if others := sorted(
        {measurement.engine_version for measurement in results.measurements if measurement.engine_version}
    ):
        text += f"; {', '.join(others)}"
    ended = len(results.measurements)
    if ended < results.trials:
        missing = results.trials - ended
        text += f"; {missing} of {counted(results.trials, 'trial')} {'has' if missing == 1 else 'have'} not run"
    if results.left_out:
        more = counted(results.left_out, "more candidate is left out", "more candidates are left out")
        text += f"; {more} by search.max_trials = {values.search.max_trials}"
    return f"{text}."


def _figures(results: Results) -> str:
    """What the columns hold that are not measured alone."""
    columns = columns_of(rows(results))
    text = what_rates_are(columns, results.recipe)
    if "predicted_s" in columns:
        text += f"; predicted by the cost model ({results.predicted_on}); error: predicted by measured time, minus 1"
    if "corrected_s" in columns:
        text += f"; {WORDS}"
    if "communicated_bytes" in columns:
        text += (
            "; communicated, communicating: of DeepSpeed's log in a second run, whose calls block and so overlap with "
            "nothing; per iteration of the rank that has most: bytes that its calls take (receives count at their "
            "sender) and seconds inside them, waiting for other ranks included"
        )
    if results.baseline:
        text += f"; speed-up over {results.baseline}"
    return text


def _again(results: Results, folder: Path | None = None, *options: str) -> str:
    """The command that makes the table again, in ``folder`` if given; ``options`` are further options of `table`."""
    recipe = results.recipe
    if results.baseline:
        options = (*options, f"--baseline={results.baseline}")
    if recipe.shipped and not recipe.overrides and folder in (None, REFERENCE / recipe.name) and not options:
        return f"make {'sweep' if folder is None else 'reference'} RECIPE={recipe.name}"
    if folder is not None:
        options = ("--output", str(folder), *options)
    sweep = recipe.command("sweep")
    return f"{sweep} && {recipe.command('table', *options)}" if options else sweep


def _rank(measurement: Measurement) -> tuple[int, float]:
    statuses = list(Status)
    return statuses.index(measurement.status), measurement.median_s if measurement.iteration_s else 0.0


def _latex(results: Results, records: Sequence[dict[str, Any]], folder: Path | None) -> str:
    """The table for a document that loads the package booktabs, under the caption as a comment."""
    comment = fill(provenance(results), 110, initial_indent="% ", subsequent_indent="% ")
    return f"{comment}\n% Again: {_again(results, folder, '--latex')}\n{_table(records, 'latex_booktabs')}\n"


def _table(records: Sequence[dict[str, Any]], form: str, columns: Mapping[str, str] | None = None) -> str:
    columns = columns_of(records) if columns is None else columns
    headings = list(columns.values())
    if form != "simple":
        headings = [heading.replace("-\n", "-").replace("\n", " ") for heading in headings]
    rows = [cells(row, columns) for row in records]
    return tabulate(rows, headings, tablefmt=form, colalign=aligned(columns), disable_numparse=True)
