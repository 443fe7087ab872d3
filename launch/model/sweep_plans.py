"""The plans of a recipe's search space that a sweep runs, and the reasons why others do not run."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from auto3d.errors import InputError
from auto3d.plan import AUTO3D, Plan
from auto3d.search.axes import Candidate
from auto3d.search.listing import ListedCandidate, list_candidates
from auto3d.search.space import Domain, Refusals, without_numbers
from launch.model.candidates import check_memory_known, check_rules, exact_plans, runnable_maker, task
from launch.model.graphs import PlanningModel
from launch.model.nearest import none_runs
from launch.model.search import search_recipe
from launch.recipe.schema_key import AUTO
from launch.recipe.settings import cluster, search_space


@dataclass(frozen=True, kw_only=True)
class SweepPlans:
    """The plans that a sweep runs, with their candidates, and what became of the other candidates."""

    candidates: dict[Plan, Candidate]
    left_out: int = 0  # candidates beyond search.max_trials
    infeasible: dict[Plan, ListedCandidate] = field(default_factory=dict)  # plans that a peer cannot train
    refused: Refusals = field(default_factory=Refusals)


def plans_of_sweep(model: PlanningModel, *, before: Sequence[Candidate] = ()) -> SweepPlans:
    """The plans that a sweep of the recipe of ``model`` runs; raises RecipeError if none can run.

    They are all plans of the search space or, if there are more than search.max_trials, the plans of the candidates
    ``before`` and then the fastest by prediction.
    """
    recipe = model.recipe
    if AUTO in recipe.values.search.recompute:
        check_memory_known(recipe, "search.recompute")
    domain = Domain(search_space(recipe.values), cluster(recipe), task(recipe))
    engines = {candidate.engine for candidate in domain.degrees}
    if len(domain) <= recipe.values.search.max_trials or engines != {AUTO3D}:  # nothing predicts other engines
        return _listed(model, domain, before)
    return _searched(model, before)


def _listed(model: PlanningModel, domain: Domain, before: Sequence[Candidate]) -> SweepPlans:
    """Every plan of ``domain``; of too many, the plans of ``before``, and then the fastest if auto3d ran them."""
    recipe = model.recipe
    check_rules(domain, model)
    maker = runnable_maker(model)
    listed = list(list_candidates(domain, maker))
    candidates = {entry.plan: entry.candidate for entry in listed if entry.plan is not None}
    refused = Refusals() if listed else domain.refused  # no degrees have the right number of devices
    for entry in listed:
        if entry.plan is None:
            refused.add(entry.candidate, entry.reason, entry.kind)
    if not candidates:
        raise none_runs(recipe, refused, maker, [entry.candidate for entry in listed if entry.kind == "memory"])
    plans = list(candidates)
    if left_out := max(0, len(plans) - recipe.values.search.max_trials):
        seconds = {plan: maker.model.seconds(plan) for plan in plans}
        plans.sort(key=lambda plan: (candidates[plan] not in before, seconds[plan]))
        kept = set(plans[: recipe.values.search.max_trials])
        candidates = {plan: candidate for plan, candidate in candidates.items() if plan in kept}
    return SweepPlans(candidates=candidates, left_out=left_out, infeasible=_refused_by_peers(listed), refused=refused)


def _searched(model: PlanningModel, before: Sequence[Candidate]) -> SweepPlans:
    """The plans of ``before`` or, if there are none, the fastest of a search."""
    recipe, maker = model.recipe, runnable_maker(model)
    most = recipe.values.search.max_trials
    candidates: dict[Plan, Candidate] = {}
    for candidate in before:
        with suppress(InputError):  # the model's code may have changed since
            candidates[maker.plan(candidate)] = candidate
    if candidates:
        return SweepPlans(candidates=candidates)
    search = search_recipe(recipe, process=model.process, best=most)
    exact, refused = exact_plans(recipe, maker), search.refused()
    for ranked_plan in search.ranked():
        if len(candidates) == most:
            break
        try:
            candidates.setdefault(exact(ranked_plan), ranked_plan.candidate)
        except InputError as error:  # for example memory, which is exact only at the plan's own micro-batch size
            refused.add(ranked_plan.candidate, str(error), error.kind)
    if not candidates:
        raise none_runs(recipe, refused, maker, search.lacking_memory)
    total = len(search.domain) + search.domain.refused.total
    return SweepPlans(candidates=candidates, left_out=total - refused.total - len(candidates), refused=refused)


def _refused_by_peers(listed: Iterable[ListedCandidate]) -> dict[Plan, ListedCandidate]:
    """The plans that peers cannot train: for each peer, whatever its options, a plan for each reason."""
    first: dict[tuple[str, str], ListedCandidate] = {}
    for entry in listed:
        if entry.refused is not None:
            engine = entry.refused.engine.partition(":")[0]
            reason = without_numbers(entry.reason.removeprefix(entry.refused.engine))
            first.setdefault((engine, reason), entry)
    return {entry.refused: entry for entry in first.values() if entry.refused is not None}
