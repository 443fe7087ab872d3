"""Rows of a CSV file -> plans of a recipe, and what the cost model predicts for them, or for plans made elsewhere."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from auto3d.cost.model import CostModel
from auto3d.errors import InputError
from auto3d.plan import AUTO3D, Plan
from auto3d.schedule import schedule_of
from auto3d.search.axes import AXES, TYPES, Candidate
from auto3d.search.make import PlanMaker, shortage_of
from auto3d.search.planned_model import PlannedModel
from auto3d.simulate.simulate import Timeline, simulate
from launch.model.candidates import candidate_of, task
from launch.model.costs import captured_subject, cost_model, subject_of
from launch.model.graphs import PlanningModel
from launch.model.profile import basis
from launch.recipe.load import LoadedRecipe
from launch.recipe.search_schema import PlanRecipe
from launch.recipe.settings import emulation, predicted_precision, predicted_times

REQUIRED = ("micro_batch_size", "tp", "dp", "pp")  # every row has them
_OTHERS = tuple(name for name in AXES if name not in (*REQUIRED, "replicas", "engine"))  # rows have equal replicas
PLAN_COLUMNS = (*REQUIRED, "partition_cuts", *_OTHERS)
_TRUTH_OF = {"false": False, "true": True, "0": False, "1": True}


@dataclass(frozen=True)
class Prediction:
    """The prediction for one row."""

    row: Mapping[str, str]
    seconds: float | None  # time of one iteration
    peak_bytes: float | None  # largest of the devices
    problem: str  # the reason why there is no prediction, or why the plan does not fit into memory
    measured_in: str = ""  # file of the profile that the seconds come from, if there is one


@dataclass(frozen=True)
class PlannedRow:
    """A row, the recipe as the row changes it, and the plan that the row describes."""

    row: Mapping[str, str]
    recipe: LoadedRecipe
    model: CostModel
    plan: Plan | None
    problem: str  # the reason why there is no plan


def read_candidates(recipe: LoadedRecipe, file: str) -> list[dict[str, str]]:
    """The rows of a CSV file; its columns get the names that ``prediction.columns`` gives them.

    Raises InputError where a column is missing that every candidate needs.
    """
    renamed = recipe.values.prediction.columns
    with Path(file).open(newline="") as lines:
        rows = [{renamed.get(name, name): value for name, value in row.items()} for row in csv.DictReader(lines)]
    if not rows:
        raise InputError(f"{file}: holds no rows; it needs one row per candidate")
    missing = [name for name in REQUIRED if name not in rows[0]]
    if missing:
        raise InputError(
            f"{file}: lacks the column {missing[0]}; it takes {', '.join(PLAN_COLUMNS)} and keys of a recipe such as "
            "model.config.n_layer"
        )
    return rows


def predict(recipe: LoadedRecipe, rows: Sequence[Mapping[str, str]]) -> Iterator[Prediction]:
    """The predictions for ``rows``, in order."""
    for planned in plan_rows(recipe, rows):
        if planned.plan is None:
            yield Prediction(planned.row, None, None, planned.problem)
            continue
        try:
            seconds = planned.model.seconds(planned.plan)
        except InputError as error:  # for example layers that were not measured at this degree
            yield Prediction(planned.row, None, None, str(error))
            continue
        peak, problem = max(planned.model.memory.of(planned.plan)), shortage_of(planned.model, planned.plan)
        yield Prediction(planned.row, seconds, peak, problem, planned.model.measured_in)


@dataclass(frozen=True)
class PlanPredictions:
    """Predicted seconds per iteration of plans, without those that have no prediction."""

    seconds: Mapping[Plan, float]
    based_on: str  # method and figures, in words; empty if there is no prediction
    profiled: bool = True  # whether they rest on a profile of the machine


def predict_plans(model: PlanningModel, plans: Sequence[Plan]) -> PlanPredictions:
    """The predictions for ``plans`` of ``model``, which are about to run.

    There are none where nothing is known about the devices: the recipe names no accelerator, and no profile fits. Nor
    are there any for emulated devices, whose times are not the cluster's.
    """
    recipe, none = model.recipe, PlanPredictions({}, "")
    if emulation(recipe.values) is not None:
        return none
    costs = cost_model(recipe, captured_subject(model))
    kinds = (recipe.values.cluster, *recipe.values.cluster.more)
    if not costs.measured_in and any(kind.accelerator is None for kind in kinds):
        return none
    seconds = {}
    for plan in (plan for plan in plans if plan.engine == AUTO3D):  # only auto3d has a cost model
        with suppress(InputError):  # for example a degree that the profile lacks
            seconds[plan] = costs.seconds(plan)
    based_on = f"{recipe.values.prediction.method}, on {basis(recipe, costs.measured_in)}"
    predicted, trained = predicted_precision(recipe.values), recipe.values.training.precision
    if predicted != trained and not costs.measured_in:
        based_on += f", in {predicted}, while trials train in {trained}"
    return PlanPredictions(seconds, based_on, profiled=bool(costs.measured_in))


def predicted_timeline(recipe: LoadedRecipe, plan: Plan) -> tuple[Timeline | None, str]:
    """The simulation of ``plan`` in seconds, and what it rests on; None, and why, where nothing is known.

    Emulated devices have the times that they are given.
    """
    model = PlanningModel(recipe)
    given = emulation(recipe.values)
    if given is not None:
        schedule = schedule_of(plan)
        times = given.costs_of_plan(plan, schedule, model.graph)
        return simulate(schedule, times), "emulation"
    costs = cost_model(recipe, captured_subject(model))
    kinds = (recipe.values.cluster, *recipe.values.cluster.more)
    if not costs.measured_in and any(kind.accelerator is None for kind in kinds):
        return None, "the recipe names no accelerator, and there is no profile of this machine (auto3d profile)"
    try:
        return costs.timeline(plan), basis(recipe, costs.measured_in)
    except InputError as error:  # the profile may lack a degree, for example
        return None, str(error)


def plan_rows(
    recipe: LoadedRecipe,
    rows: Sequence[Mapping[str, str]],
    *,
    subject: Callable[[LoadedRecipe], PlannedModel] = subject_of,
) -> Iterator[PlannedRow]:
    """The plans of ``rows``, in order; ``subject`` makes the model of a recipe (default: captured at every size).

    A column with a dot in its name is a key of the recipe, which the row changes; columns that are neither that nor in
    PLAN_COLUMNS are ignored. Raises RecipeError where a row makes the recipe invalid.
    """
    keys = [name for name in rows[0] if "." in name]

    subjects: dict[str, PlannedModel] = {}
    models: dict[str, CostModel] = {}

    @cache
    def maker_of(overrides: tuple[str, ...]) -> tuple[LoadedRecipe, PlanMaker]:
        changed = recipe.changed(overrides) if overrides else recipe
        values = changed.values
        known = f"{values.model} {values.data} {values.prediction} {values.training.precision}"
        planned = subjects.setdefault(known, subjects.get(known) or subject(changed))
        known += f"{values.cluster} {values.training.optimizer}"
        model = models.setdefault(known, models.get(known) or cost_model(changed, planned))
        return changed, PlanMaker(planned, model, task(changed))

    for line, row in enumerate(rows, 2):  # line 1 holds the names of the columns
        overrides = tuple(f"{key}={row[key]}" for key in keys if row[key])
        changed, maker = maker_of(overrides)
        try:
            yield PlannedRow(row, changed, maker.model, maker.unlimited(candidate_of_row(changed, row)), "")
        except InputError as error:
            yield PlannedRow(row, changed, maker.model, None, f"line {line}: {error}")


def candidate_of_row(recipe: LoadedRecipe, row: Mapping[str, str]) -> Candidate:
    """The candidate that a row describes; what the row leaves open comes from the recipe's plan.

    Raises InputError where an axis does not take its value.
    """
    base = candidate_of(recipe.values.plan or PlanRecipe())
    choices: dict[str, Any] = {"partition": predicted_times(recipe.values).partition}
    choices |= {name: _value(name, row[name]) for name in REQUIRED}
    choices |= {name: _value(name, row[name]) for name in _OTHERS if row.get(name)}
    cuts = tuple(json.loads(row["partition_cuts"])) if row.get("partition_cuts") else None
    return replace(base, **choices, cuts=cuts)


def _value(name: str, text: str) -> Any:
    """The value of the axis ``name`` that ``text``, a cell of a CSV file, stands for."""
    axis, kind = AXES[name], TYPES[name]
    if kind is int:
        with suppress(ValueError):
            return int(text)
        raise InputError(f"{name}: found {text!r}; it takes a whole number")
    if kind is bool:
        if text.lower() in _TRUTH_OF:
            return _TRUTH_OF[text.lower()]
        raise InputError(f"{name}: found {text!r}; it takes {' or '.join(_TRUTH_OF)}")
    if axis.options or text in axis.takes:  # options are checked where the schedule is made
        return text
    if text.lower() in axis.takes:
        return text.lower()
    words = ", ".join(map(str, axis.takes))
    if axis.least is None or axis.most is None:
        raise InputError(f"{name}: found {text!r}; it takes one of {words}")
    with suppress(ValueError):
        if axis.least <= float(text) <= axis.most:
            return float(text)
    raise InputError(f"{name}: found {text!r}; it takes {words}, or a number from {axis.least:g} to {axis.most:g}")
