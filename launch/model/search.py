"""Recipe -> ranked candidates: the search of `auto3d plan`, `auto3d tune` and a sweep of a large space."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from math import inf

from auto3d.plan import AUTO3D, Plan, PlanError
from auto3d.schedule import SCHEDULES, parse_schedule
from auto3d.search.algorithms import AMP, run_algorithm
from auto3d.search.algorithms.amp import amp_space
from auto3d.search.axes import DEFAULTS_OF_SHARDS
from auto3d.search.make import PlanMaker
from auto3d.search.planned_model import PlannedGraphs, PlannedModel
from auto3d.search.search import Budget, Search
from auto3d.search.space import Domain
from auto3d.share import Share, share_of
from auto3d.words import counted
from launch.model.candidates import check_memory_known, check_rules, task, updates_check
from launch.model.capture_process import CaptureProcess
from launch.model.costs import INTERPOLATED, cost_model, planning_subject
from launch.model.graphs import PlanningModel
from launch.model.nearest import no_plan_found
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema_key import AUTO
from launch.recipe.settings import (
    emulation,
    most_candidates,
    most_simulations,
    most_trials,
    planner_options,
    search_space,
)

SHOWN = 20  # plans that `auto3d plan` prints: a search loses none of them


def search_recipe(
    recipe: LoadedRecipe,
    tell: Callable[[int, float, bool], None] | None = None,
    *,
    subject: PlannedModel | None = None,
    process: CaptureProcess | None = None,
    best: int = 0,
    keep_interrupted: bool = False,
) -> Search:
    """The finished search that the recipe asks for; raises RecipeError if no candidate can run.

    ``tell`` is called with the number of candidates looked at, the best predicted seconds so far, and whether an order
    is sought now. ``subject`` is the recipe's model, if another search has planned it before (default:
    ``planning_subject``, which captures in ``process`` if there is one). The search loses none of the ``best`` fastest
    plans. With ``keep_interrupted``, Ctrl-C ends it, and what it has found so far is its result.
    """
    settings = recipe.values.search
    if AUTO in settings.recompute:
        check_memory_known(recipe, "search.recompute")
    subject, emulated = subject or planning_subject(recipe, process=process), emulation(recipe.values)

    check_updates = None
    if isinstance(subject, PlannedGraphs):
        check_updates = updates_check(recipe, lambda: subject.graph(INTERPOLATED[0]))

    def check(plan: Plan) -> None:
        if plan.engine != AUTO3D:
            raise PlanError(f"{plan.engine} is measured by `auto3d sweep`; only {AUTO3D} has a cost model")
        if check_updates is not None:
            check_updates(plan)
        if emulated is not None:
            emulated.check(plan)

    model = cost_model(recipe, subject)
    space = search_space(recipe.values)
    if settings.algorithm == AMP:
        space = amp_space(space, model.cluster)
    domain = Domain(space, model.cluster, task(recipe))
    if recipe.values.model.layers is None:
        check_rules(domain, PlanningModel(recipe, process=process))
    maker = PlanMaker(subject, model, task(recipe), check=check, order_seconds=settings.order_seconds)
    _prepare(maker, domain)
    budget = Budget(
        candidates=most_candidates(recipe.values),
        simulations=most_simulations(recipe.values),
        seconds=settings.seconds or inf,
        best=max(best, SHOWN, most_trials(recipe.values)),
    )
    search = Search(domain, maker, budget, tell=tell, options=planner_options(recipe.values))
    try:
        if domain.degrees:
            run_algorithm(algorithm(recipe), search, settings.seed)
            maker.check_captured()
    except KeyboardInterrupt:
        if not keep_interrupted or not search.ranked():
            raise
        search.interrupt()
    if not search.ranked():
        raise no_plan_found(recipe, search)
    return search


def _prepare(maker: PlanMaker, domain: Domain) -> None:
    """Capture the model and divide its work for all of ``domain``, so that no budget of the search includes it."""
    candidates = chain.from_iterable(domain.variants(candidate, DEFAULTS_OF_SHARDS) for candidate in domain.degrees)
    shares = sorted({(candidate.micro_batch_size, share_of(candidate)) for candidate in candidates})
    maker.prepare(shares)
    maker.prepare(
        (samples, replace(share, slices=slices))
        for samples, share in shares
        if share == Share(tp=share.tp)
        for slices in _slices(domain)
    )


def _slices(domain: Domain) -> list[int]:
    """The numbers of slices of the sequence in which schedules of ``domain`` run a micro-batch."""
    schedules = ((SCHEDULES[name], given) for name, given in map(parse_schedule, domain.choices["schedule"]))
    counts = {int({**family.options, **given}["slices"]) for family, given in schedules if family.sliced}
    return sorted(counts - {1})


def algorithm(recipe: LoadedRecipe) -> str:
    """The name of the search algorithm; ``auto`` is exhaustive, which begins with what promises most."""
    named = recipe.values.search.algorithm
    return "exhaustive" if named == AUTO else named


def described_as(recipe: LoadedRecipe, search: Search) -> str:
    """What ``search`` did, in words, and what ended it before it was sure of the best plans."""
    candidates = f"{len(search.domain) + search.domain.refused.total:,}"
    looked_at = f"{search.looked_at:,} looked at, {search.simulated:,} simulated"
    if search.ruled_out:
        looked_at = f"{search.ruled_out:,} ruled out at once, {looked_at}"
    text = f"{algorithm(recipe)} search of {candidates} candidates: {looked_at}, in {search.elapsed_s:.1f} s"
    if search.interrupted:
        text += "; it was interrupted"
    elif search.ended_by:
        key = f"search.{search.ended_by}"
        text += f"; {key} = {getattr(search.budget, search.ended_by):g} ended it, and a larger {key} gives it more"
    if search.left.candidates:
        bound = f", which take {search.left.least_s:.4g} s or more" if search.left.least_s < inf else ""
        text += f"; it left out {counted(search.left.candidates, 'candidate')}{bound}"
    return text
