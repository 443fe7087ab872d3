"""The plans of search.planners in a sweep: of each search algorithm the plan that it finds alone."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.search.axes import Candidate
from auto3d.search.search import Ranked
from launch.model.candidates import exact_plans, runnable_maker
from launch.model.graphs import PlanningModel
from launch.model.search import search_recipe


def plans_of_planners(
    model: PlanningModel, tell: Callable[[str], None], *, before: Mapping[str, tuple[Plan, Candidate]]
) -> dict[Plan, tuple[Candidate, str]]:
    """The plan of each of search.planners, with its candidate and the names of all planners that found it.

    A planner keeps its plan ``before``, if it has any. One without a plan that can run is left out; ``tell`` hears why.
    """
    recipe, plans = model.recipe, dict[Plan, tuple[Candidate, str]]()
    if not recipe.values.search.planners:
        return plans
    exact = exact_plans(recipe, runnable_maker(model))
    for name in recipe.values.search.planners:
        try:
            plan, candidate = before[name] if name in before else _plan_of(name, model, exact)
        except InputError as error:
            tell(f"search.planners: {name} has no plan: {error}")
            continue
        first, names = plans.get(plan, (candidate, ""))
        plans[plan] = first, f"{names}, {name}" if names else name
    return plans


def _plan_of(planner: str, model: PlanningModel, exact: Callable[[Ranked], Plan]) -> tuple[Plan, Candidate]:
    """The fastest plan of the ``planner`` that can run; raises InputError if there is none."""
    values = model.recipe.values
    search = replace(values.search, algorithm=planner, planners=[])
    alone = replace(model.recipe, values=replace(values, search=search))
    ranked = search_recipe(alone, process=model.process).ranked()
    refused: InputError | None = None
    for ranked_plan in ranked:
        try:
            return exact(ranked_plan), ranked_plan.candidate
        except InputError as error:
            refused = refused or error
    assert refused is not None  # a search without a plan raises
    raise refused
