"""Why there is no plan: the candidate that came nearest, and what would make it fit."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from auto3d.cost.memory.device import in_gib
from auto3d.errors import InputError
from auto3d.search.axes import AXES, Candidate
from auto3d.search.make import PlanMaker
from auto3d.search.recompute import AUTO, FULL
from auto3d.search.search import Search
from auto3d.search.space import Refusals
from auto3d.words import counted
from launch.recipe.error import RecipeError
from launch.recipe.load import LoadedRecipe


def no_plan_found(recipe: LoadedRecipe, search: Search) -> RecipeError:
    """The error of a ``search`` without a plan. That none can run, it says only if all candidates were looked at."""
    refused = search.refused()
    if not search.ended_by and not refused.total:
        every = counted(len(search.domain), "candidate")
        problem = f"{recipe.values.search.algorithm} makes no plan of this search space: it takes none of its {every}"
        return recipe.error("search.algorithm", problem)
    if not search.ended_by:
        return none_runs(recipe, refused, search.maker, search.lacking_memory)
    key = f"search.{search.ended_by}"
    problem = (
        f"no plan found before {key} = {getattr(search.budget, search.ended_by):g} ended the search: "
        f"{search.looked_at + search.ruled_out} of {counted(len(search.domain), 'candidate')} looked at or ruled out; "
        f"a larger {key} gives it more"
    )
    return recipe.error("search", problem + _nearest(search.maker, search.lacking_memory))


def none_runs(
    recipe: LoadedRecipe, refused: Refusals, maker: PlanMaker, lacking_memory: Sequence[Candidate]
) -> RecipeError:
    """The error of a search space whose candidates were all ``refused``, some of them as ``lacking_memory``."""
    refusal = refused.foremost
    problem = f"its only candidate cannot run: {refusal.reason}"
    if refused.total > 1:
        problem = f"none of its {refused.total} candidates can run; {refusal.count} of them: {refusal.reason}"
    return recipe.error("search", problem + _nearest(maker, lacking_memory), kind=refusal.kind)


def _nearest(maker: PlanMaker, lacking_memory: Sequence[Candidate]) -> str:
    """The candidate that lacks least memory, how much, and what makes it fit; empty if there is none."""
    best: tuple[float, Candidate] | None = None
    for candidate in lacking_memory:
        try:
            plan = maker.unlimited(candidate)
        except InputError:
            continue
        capacity = [maker.model.cluster.memory_of(mesh.ranks) or inf for mesh in plan.meshes]
        missing = max(needed - has for needed, has in zip(maker.model.memory.of(plan), capacity, strict=True))
        if best is None or missing < best[0]:
            best = missing, candidate
    if best is None:
        return ""
    missing, candidate = best
    fits = " or ".join(words for words, other in _remedies(candidate) if _can_run(maker, other))
    helps = f"what makes it fit: {fits}" if fits else "it needs more devices, or devices with more memory"
    return f"; the nearest ({candidate}) lacks {in_gib(max(0.0, missing))} GiB; {helps}"


def _remedies(candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    """Changes of ``candidate`` that save memory, in the words of a recipe."""
    if candidate.recompute not in (FULL, AUTO):
        yield "search.recompute: [full]", replace(candidate, recompute=FULL)
    if candidate.micro_batch_size > 1:
        yield "search.micro_batch_size: [1]", replace(candidate, micro_batch_size=1)
    for name, axis in AXES.items():
        if axis.saves_memory and axis.matters(candidate) and not getattr(candidate, name):
            other: dict[str, Any] = {name: True}
            yield f"search.{name}: [true]", replace(candidate, **other)


def _can_run(maker: PlanMaker, candidate: Candidate) -> bool:
    try:
        maker.plan(candidate)
    except InputError:
        return False
    return True
