"""Recipe -> ranked candidates: the search of `auto3d plan` and `auto3d tune`."""

from collections.abc import Callable

from auto3d.cost.share import Share
from auto3d.plan import AUTO3D, Plan, PlanError
from auto3d.schedule import SCHEDULES, parse_schedule
from auto3d.search.algorithms import AMP, run_algorithm
from auto3d.search.algorithms.amp import amp_space
from auto3d.search.make import PlanMaker
from auto3d.search.planned_model import PlannedModel
from auto3d.search.search import Budget, Search
from auto3d.search.space import Domain
from launch.model.candidates import check_memory_known, check_rules, none_runs, task
from launch.model.costs import INTERPOLATED, cost_model, planning_subject
from launch.model.graphs import PlanningModel
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema_key import AUTO
from launch.recipe.settings import emulation, most_candidates, most_trials, search_space


def search_recipe(
    recipe: LoadedRecipe,
    tell: Callable[[int, float, bool], None] | None = None,
    *,
    subject: PlannedModel | None = None,
) -> Search:
    """The finished search that the recipe asks for; raises RecipeError if no candidate can run.

    ``tell`` is called with the number of candidates looked at, the best predicted seconds so far, and whether an order
    is sought now. ``subject`` is the recipe's model, if another search has planned it before (default:
    ``planning_subject``).
    """
    settings = recipe.values.search
    if AUTO in settings.recompute:
        check_memory_known(recipe, "search.recompute")
    subject, emulated = subject or planning_subject(recipe), emulation(recipe.values)

    def check(plan: Plan) -> None:
        if plan.engine != AUTO3D:
            raise PlanError(f"{plan.engine} is measured by `auto3d sweep`; only {AUTO3D} has a cost model")
        if emulated is not None:
            emulated.check_fits(plan.stages)

    model = cost_model(recipe, subject)
    space = search_space(recipe.values)
    if settings.algorithm == AMP:
        space = amp_space(space, model.cluster)
    domain = Domain(space, model.cluster, task(recipe))
    if recipe.values.model.layers is None:
        check_rules(recipe, domain, PlanningModel(recipe))
    maker = PlanMaker(subject, model, task(recipe), check=check, order_seconds=settings.order_seconds)
    kinds = domain.choices["sequence_parallel"]
    degrees = ((one.micro_batch_size, one.tp, kind and one.tp > 1) for one in domain.degrees for kind in kinds)
    # The first captured size comes first: the model is split there, while another process captures the other size.
    ordered = sorted(set(degrees), key=lambda degree: (degree[0] != INTERPOLATED[0], degree))
    maker.prepare((samples, Share(tp=tp, sequence_parallel=kind)) for samples, tp, kind in ordered)
    maker.prepare(
        (samples, Share(slices=slices)) for samples, tp, _ in ordered if tp == 1 for slices in _slices(domain)
    )
    looks, trials = most_candidates(recipe.values), most_trials(recipe.values)
    budget = Budget(candidates=looks, seconds=settings.seconds, best=trials)
    search = Search(domain, maker, budget, tell=tell)
    if domain.degrees:
        run_algorithm(algorithm(recipe, domain), search, settings.seed)
        maker.check_captured()
    if not search.ranked():
        raise none_runs(recipe, search.refused())
    return search


def _slices(domain: Domain) -> list[int]:
    """The numbers of slices of the sequence in which schedules of ``domain`` run a micro-batch."""
    schedules = ((SCHEDULES[name], given) for name, given in map(parse_schedule, domain.choices["schedule"]))
    found = {int({**family.options, **given}["slices"]) for family, given in schedules if family.sliced}
    return sorted(found - {1})


def algorithm(recipe: LoadedRecipe, domain: Domain) -> str:
    """The name of the search algorithm; ``auto`` is exhaustive if the budget covers the whole space, else annealing."""
    named = recipe.values.search.algorithm
    if named != AUTO:
        return named
    return "exhaustive" if len(domain) <= most_candidates(recipe.values) else "annealing"
