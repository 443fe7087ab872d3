"""`auto3d predict`: the seconds of an iteration and the peak bytes of each configuration of a CSV file."""

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tabulate import tabulate

from auto3d.cost.device_memory import in_gib
from auto3d.cost.model import CostModel
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.schedule import write_schedule
from auto3d.search.make import PlanMaker, shortage_of
from auto3d.search.placement import MEGATRON
from auto3d.search.planned_model import PlannedModel
from auto3d.search.recompute import AUTO, FULL, NONE
from auto3d.search.space import Candidate
from launch.console.output import print_json
from launch.model.candidates import task
from launch.model.costs import cost_model, subject_of
from launch.model.profile import basis
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema import PlanRecipe

DEGREES = ("micro_batch_size", "tp", "dp", "pp")
PLAN_COLUMNS = (*DEGREES, "partition_cuts", "schedule", "recompute", "partition", "placement")
ADDED = ("predicted_s", "predicted_peak_bytes", "problem")


@dataclass(frozen=True)
class Prediction:
    """Of one row; ``problem`` says why there is none, or that the plan does not fit into memory."""

    row: Mapping[str, str]
    seconds: float | None
    peak_bytes: float | None
    problem: str
    measured_in: str = ""  # the profile that the seconds come from


def print_predictions(recipe: LoadedRecipe, *, file: str, out_file: str | None, as_json: bool) -> None:
    """Predict every row of ``file``; print a table, or write the rows with what was predicted to ``out_file``."""
    rows = read_candidates(recipe, file)
    found = list(predict(recipe, rows))
    if out_file:
        write(out_file, found)
    if as_json:
        print_json(
            [{**one.row, **dict(zip(ADDED, (one.seconds, one.peak_bytes, one.problem), strict=True))} for one in found]
        )
    elif out_file:
        print(f"written: {out_file}, {len(found)} rows")
    else:
        shown = [name for name in rows[0] if name in PLAN_COLUMNS or "." in name]
        cells = [
            (
                *(one.row[name] for name in shown),
                "" if one.seconds is None else f"{one.seconds:.4g}",
                "" if one.peak_bytes is None else in_gib(one.peak_bytes),
                one.problem,
            )
            for one in found
        ]
        print(tabulate(cells, [*shown, "predicted s", "peak GiB", "problem"], disable_numparse=True))
    how = recipe.values.prediction.method
    problems = sum(bool(one.problem) for one in found)
    measured_in = next((one.measured_in for one in found if one.measured_in), "")
    told = f"times are {how} on {basis(recipe, measured_in)}, not measured"
    print(f"{len(found)} candidates, {problems} with a problem; {told}", file=sys.stderr)


def read_candidates(recipe: LoadedRecipe, file: str) -> list[dict[str, str]]:
    """The rows of a CSV file, under the names of columns that the recipe gives them.

    Raises InputError where it lacks a column that every candidate needs.
    """
    renamed = recipe.values.prediction.columns
    with Path(file).open(newline="") as lines:
        rows = [{renamed.get(name, name): value for name, value in row.items()} for row in csv.DictReader(lines)]
    if not rows:
        raise InputError(f"{file}: holds no rows; a row for each candidate is needed")
    missing = [name for name in DEGREES if name not in rows[0]]
    if missing:
        raise InputError(
            f"{file}: lacks the column {missing[0]}; it takes {', '.join(PLAN_COLUMNS)} and keys of a recipe such as "
            "model.config.n_layer"
        )
    return rows


def predict(recipe: LoadedRecipe, rows: Sequence[Mapping[str, str]]) -> Iterator[Prediction]:
    """A prediction for each of ``rows``."""
    for one in bind(recipe, rows):
        if one.plan is None:
            yield Prediction(one.row, None, None, one.problem)
            continue
        try:
            seconds = one.model.seconds(one.plan)
        except InputError as error:  # such as layers that were not measured at this degree
            yield Prediction(one.row, None, None, str(error))
            continue
        peak, problem = max(one.model.memory(one.plan)), shortage_of(one.model, one.plan)
        yield Prediction(one.row, seconds, peak, problem, one.model.measured_in)


@dataclass(frozen=True)
class Bound:
    """A row with the plan that it means, of the recipe as it changes it; ``problem`` says why there is none."""

    row: Mapping[str, str]
    recipe: LoadedRecipe
    model: CostModel
    plan: Plan | None
    problem: str


def bind(recipe: LoadedRecipe, rows: Sequence[Mapping[str, str]]) -> Iterator[Bound]:
    """The plan of each of ``rows``; a column with a dot in its name is a key of the recipe that the row changes.

    Other columns, such as measured seconds, are passed over. Raises RecipeError where a row changes the recipe into one
    that cannot be.
    """
    keys = [name for name in rows[0] if "." in name]

    subjects: dict[str, PlannedModel] = {}
    models: dict[str, CostModel] = {}

    @cache
    def maker_of(overrides: tuple[str, ...]) -> tuple[LoadedRecipe, PlanMaker]:
        changed = recipe.changed(overrides) if overrides else recipe
        values = changed.values
        known = f"{values.model} {values.data} {values.prediction}"
        subject = subjects.setdefault(known, subjects.get(known) or subject_of(changed))
        known += f"{values.cluster} {values.training.optimizer}"
        model = models.setdefault(known, models.get(known) or cost_model(changed, subject))
        return changed, PlanMaker(subject, model, task(changed))

    for number, row in enumerate(rows, 2):
        overrides = tuple(f"{key}={row[key]}" for key in keys if row[key])
        changed, maker = maker_of(overrides)
        try:
            yield Bound(row, changed, maker.model, maker.unlimited(_candidate(changed, row)), "")
        except InputError as error:
            yield Bound(row, changed, maker.model, None, f"line {number}: {error}")


def write(file: str, predictions: Sequence[Prediction]) -> None:
    """The rows as they were, with what was predicted in columns of its own."""
    with Path(file).open("w", newline="") as lines:
        writer = csv.DictWriter(lines, [*predictions[0].row, *ADDED], extrasaction="ignore")
        writer.writeheader()
        for one in predictions:
            seconds = "" if one.seconds is None else f"{one.seconds:.6g}"
            peak = "" if one.peak_bytes is None else f"{one.peak_bytes:.0f}"
            writer.writerow({**one.row, **dict(zip(ADDED, (seconds, peak, one.problem), strict=True))})


def _candidate(recipe: LoadedRecipe, row: Mapping[str, str]) -> Candidate:
    """What a row means; what it does not say is as in the recipe's plan."""
    base = recipe.values.plan or PlanRecipe()
    recompute = row.get("recompute") or base.recompute
    return Candidate(
        **{name: _whole(row, name) for name in DEGREES},
        schedule=row.get("schedule") or write_schedule(base.schedule, base.schedule_options),
        recompute=recompute if recompute in (NONE, FULL, AUTO) else float(recompute),
        partition=row.get("partition") or "blocks",
        placement=row.get("placement") or MEGATRON,
        shard_optimizer=base.shard_optimizer,
        cuts=tuple(json.loads(row["partition_cuts"])) if row.get("partition_cuts") else None,
    )


def _whole(row: Mapping[str, str], name: str) -> int:
    try:
        return int(row[name])
    except ValueError:
        raise InputError(f"{name}: found {row[name]!r}; it takes a whole number") from None
