"""Recipe -> ranked candidates: the search that `auto3d plan` prints and `auto3d tune` tries."""

from collections.abc import Callable

from auto3d.plan import Plan
from auto3d.search.algorithms import run_algorithm
from auto3d.search.make import PlanMaker
from auto3d.search.search import Budget, Search
from auto3d.search.space import Domain
from launch.model.candidates import check_memory_known, task
from launch.model.costs import cost_model, planning_subject
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema import AUTO
from launch.recipe.settings import emulation, search_space


def search_recipe(recipe: LoadedRecipe, tell: Callable[[int, float], None] | None = None) -> Search:
    """The search that the recipe asks for, done; raises RecipeError where no candidate can be.

    ``tell`` hears how many candidates were looked at, and of the best time so far.
    """
    settings = recipe.values.search
    if AUTO in settings.recompute:
        check_memory_known(recipe, "search.recompute")
    subject, emulated = planning_subject(recipe), emulation(recipe.values)

    def check(plan: Plan) -> None:
        if emulated is not None:
            emulated.check_fits(plan.stages)

    model = cost_model(recipe, subject)
    domain = Domain(search_space(recipe.values), model.cluster, task(recipe))
    maker = PlanMaker(subject, model, task(recipe), check=check)
    maker.capture(sorted({one.micro_batch_size for one in domain.degrees}))
    budget = Budget(candidates=settings.candidates, seconds=settings.seconds, best=settings.trials)
    search = Search(domain, maker, budget, tell=tell)
    if domain.degrees:
        run_algorithm(algorithm(recipe, domain), search, settings.seed)
        maker.check_captured()
    if not search.ranked():
        refused = search.refused()
        times, _, reason = next(iter(refused))
        raise recipe.error("search", f"none of its {refused.total} candidates can run; {times} of them: {reason}")
    return search


def algorithm(recipe: LoadedRecipe, domain: Domain) -> str:
    """The name of the one to use: where the recipe leaves it open, the whole space if the budget is enough for it."""
    named = recipe.values.search.algorithm
    if named != AUTO:
        return named
    return "exhaustive" if len(domain) <= recipe.values.search.candidates else "annealing"


def cannot_run(plan: Plan) -> str:
    """Why this build does not run ``plan``, which it can predict; nothing where it does."""
    return "tensor parallelism" if plan.tp > 1 else ""
