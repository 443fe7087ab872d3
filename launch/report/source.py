"""What a report is about: the trials of a recipe's last sweep or tune or, where there are none, a search."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from auto3d.cost.model import CostModel
from auto3d.errors import InputError
from auto3d.plan import AUTO3D, Plan
from auto3d.runtime.measurement import Measurement
from auto3d.schedule import samples_at_once
from auto3d.search.axes import Candidate
from auto3d.search.search import Search
from auto3d.search.space import Refusals
from auto3d.words import counted
from launch.console import tables
from launch.model import candidates
from launch.model.assumed import assumed_lines, places_assumed
from launch.model.graphs import PlanningModel
from launch.model.profile import how_to_measure
from launch.model.ranking import predicted_by
from launch.model.search import search_recipe
from launch.model.sweep_plans import plans_of_sweep
from launch.recipe.load import LoadedRecipe, load
from launch.recipe.settings import emulation, predicted_precision
from launch.store.trials import StoreError, candidate_in, last_command, measurement_of, recipe_folder, trial_settings

SEARCHED = 1000  # most plans of a search that a report lists


@dataclass(frozen=True)
class ReportedPlan:
    """A plan with the results of its trials and the cost model that predicts it."""

    plan: Plan
    candidate: Candidate | None = None  # choices that a plan does not record, such as its partition method
    measurements: tuple[Measurement, ...] = ()  # none: the plan was only predicted
    model: CostModel | None = None  # None: a plan of another engine, or of an earlier version of the model
    compared: bool = True  # whether the cost model predicts the times that were measured
    place_assumed: bool = False  # whether assumed links decide its place among the best plans of a search


@dataclass(frozen=True)
class ReportSource:
    """What a report shows, and how its numbers were made."""

    recipe: LoadedRecipe  # with the overrides of its sweep or tune
    verb: str  # command that makes this again: sweep, tune or plan
    plans: list[ReportedPlan]
    refused: Refusals
    measured: str  # how the measured numbers were made; empty if there are none
    predicted: str  # how the predicted numbers were made
    profiled: bool  # whether the predictions rest on a profile of the machine; else its trials correct them
    remarks: tuple[str, ...]  # parts that are missing from the report, with the reasons; what predictions assume


Tell = Callable[[int, float, bool], None] | None


def source_of(recipe: LoadedRecipe, tell: Tell = None) -> ReportSource:
    """What a report of ``recipe`` shows; overrides, if there are any, must be the overrides of its last sweep or tune.

    A report has measurements only of the settings that the recipe has now. Where there are none, it is the search of
    `auto3d plan`, and a remark says why. ``tell`` receives the progress of that search, as in ``search_recipe``. Raises
    RecipeError if no plan can run.
    """
    if tuned := _last_tune(recipe):
        return _of_tune(*tuned, tell)
    try:
        results = tables.results_of(recipe)
    except StoreError as error:
        return _of_search(recipe, f"Nothing on this page was measured: {error}.", tell)
    return _of_sweep(results)


# A sweep


def _of_sweep(results: tables.Results) -> ReportSource:
    recipe = results.recipe
    model = PlanningModel(recipe)
    swept_before = [candidate_in(fields) for fields in results.candidates.values()]
    swept = plans_of_sweep(model, before=swept_before)
    candidate_of = swept.candidates
    costs = candidates.runnable_maker(model).model
    plans = list(_measured_plans(model, results.measurements, candidate_of, costs))
    return ReportSource(
        recipe=recipe,
        verb="sweep",
        plans=plans,
        refused=swept.refused,
        measured=tables.provenance(results),
        predicted=predicted_by(recipe, costs.measured_in),
        profiled=_profiled(recipe, costs),
        remarks=(*_remarks(recipe, plans, costs), *assumed_lines(recipe, costs.measured_in)),
    )


def _measured_plans(
    model: PlanningModel, measurements: Sequence[Measurement], candidate_of: dict[Plan, Candidate], costs: CostModel
) -> Iterator[ReportedPlan]:
    """The plans of ``measurements``, each with all of its trials."""
    compared = not _why_not_compared(model.recipe, costs)
    trials: dict[Plan, list[Measurement]] = {}
    for measurement in measurements:
        trials.setdefault(measurement.plan, []).append(measurement)
    for plan, ended in trials.items():
        current = plan.engine != AUTO3D or plan.graph == model.graph(samples_at_once(plan)).fingerprint
        known = current and plan.engine == AUTO3D  # only auto3d has a cost model
        yield ReportedPlan(plan, candidate_of.get(plan), tuple(ended), costs if known else None, compared)


def _remarks(recipe: LoadedRecipe, tried: Sequence[ReportedPlan], costs: CostModel) -> tuple[str, ...]:
    """Why some of the plans that ran have no prediction, or none to compare with."""
    remarks = []
    if count := sum(reported.model is None and reported.plan.engine == AUTO3D for reported in tried):
        remarks.append(f"{counted(count, 'plan')} without a prediction: the model has changed since the trial.")
    if reason := _why_not_compared(recipe, costs):
        remarks.append(f"Predicted times are not compared with those of trials: {reason}.")
    return tuple(remarks)


def _profiled(recipe: LoadedRecipe, costs: CostModel) -> bool:
    """Whether predictions rest on a profile of this machine, or trials on emulated devices cannot correct them."""
    return bool(costs.measured_in) or emulation(recipe.values) is not None


def _why_not_compared(recipe: LoadedRecipe, costs: CostModel) -> str:
    """Why ``costs`` predicts other times than the trials measure; empty if it predicts theirs."""
    if emulation(recipe.values) is not None:
        return "the trials ran on emulated devices"
    kinds = (recipe.values.cluster, *recipe.values.cluster.more)
    if not costs.measured_in and any(kind.accelerator is None for kind in kinds):
        command = how_to_measure(recipe, costs.measured_in)
        how = f"; to measure it: {command}" if command else ""
        return f"they rest on round figures, not on this machine{how}"
    precision, trained = predicted_precision(recipe.values), recipe.values.training.precision
    if precision != trained and not costs.measured_in:
        return f"they are for {precision}, and trials train in {trained}"
    return ""


# A tune


def _last_tune(recipe: LoadedRecipe) -> tuple[LoadedRecipe, list[Measurement]] | None:
    """The recipe of the last command, if that was a tune of the present settings, and the ended trials; else None."""
    command = last_command(recipe)
    if command is None or command.verb != "tune":
        return None
    present = recipe if recipe.overrides else load(recipe.written, command.overrides)
    measurements = []
    for name in command.trials:
        measurement = measurement_of(recipe, name)
        if measurement is not None and _same_settings(present, name):
            measurements.append(measurement)
    return (present, measurements) if measurements else None


def _same_settings(recipe: LoadedRecipe, trial: str) -> bool:
    """Whether ``trial`` ran with the settings that ``recipe`` has now."""
    try:
        stored = load(str(recipe_folder(recipe) / "trials" / trial / "recipe.yaml"))
    except (InputError, OSError):
        return False
    return trial_settings(stored) == trial_settings(recipe)


def _of_tune(recipe: LoadedRecipe, measurements: list[Measurement], tell: Tell) -> ReportSource:
    search = _of_search(recipe, "", tell)
    model = PlanningModel(recipe)
    costs = candidates.runnable_maker(model).model
    untried = {replace(reported.plan, graph=""): reported for reported in search.plans}
    candidate_of: dict[Plan, Candidate] = {}
    for plan in {measurement.plan for measurement in measurements}:
        searched = untried.pop(replace(plan, graph=""), None)
        if searched is not None and searched.candidate is not None:
            candidate_of[plan] = searched.candidate
    tried = list(_measured_plans(model, measurements, candidate_of, costs))
    results = tables.results(recipe, measurements, len(measurements), 0)
    return replace(
        search,
        verb="tune",
        plans=[*tried, *untried.values()],
        measured=tables.provenance(results),
        profiled=_profiled(recipe, costs),
        remarks=(*search.remarks, *_remarks(recipe, tried, costs)),
    )


# A search


def _of_search(recipe: LoadedRecipe, remark: str, tell: Tell) -> ReportSource:
    search = search_recipe(recipe, tell)
    ranked, costs = search.ranked(), search.maker.model
    assumed = places_assumed(recipe, costs, ranked)
    remarks = [*([remark] if remark else []), *assumed_lines(recipe, costs.measured_in)]
    if len(ranked) > SEARCHED:
        remarks.append(f"The search ranked {len(ranked):,} plans; this page has the best {SEARCHED:,} of them.")
    return ReportSource(
        recipe=recipe,
        verb="plan",
        plans=[
            ReportedPlan(ranked_plan.plan, ranked_plan.candidate, model=costs, place_assumed=place in assumed)
            for place, ranked_plan in enumerate(ranked[:SEARCHED])
        ],
        refused=search.refused(),
        measured="",
        profiled=True,
        predicted=f"{_looked(search)}; {predicted_by(recipe, costs.measured_in)}",
        remarks=tuple(remarks),
    )


def _looked(search: Search) -> str:
    looked_at = counted(search.looked_at, "candidate")
    return f"the search looked at {looked_at} and simulated {search.simulated}; equal plans are listed once"
