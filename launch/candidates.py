"""A recipe's search space: which plans a sweep runs, and why it leaves others out."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from tabulate import tabulate

from auto3d.capture.graph import Graph
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.search.space import Candidate, SearchSpace, candidates
from launch.recipe import LoadedRecipe
from launch.schema import PlanRecipe
from launch.settings import cluster, emulation, search_space


def find(recipe: LoadedRecipe, graph_at: Callable[[int], Graph]) -> list[Candidate]:
    """Every combination of the recipe's search space, with its plan or the reason why it does not run."""
    values = recipe.values
    found = candidates(
        search_space(values),
        cluster(values),
        graph_at,
        global_batch=values.training.global_batch,
        seed=values.training.seed,
        clip_norm=values.training.clip_norm,
    )
    emulated = emulation(values)
    left, listed = values.search.max_trials, []
    for candidate in found:
        if candidate.plan is not None and emulated is not None:
            try:
                emulated.check_fits(len(candidate.plan.stages))
            except InputError as error:
                candidate = replace(candidate, plan=None, reason=str(error))
        if candidate.plan is not None and left == 0:
            candidate = replace(candidate, plan=None, reason=left_out(recipe))
        left -= candidate.plan is not None
        listed.append(candidate)
    return listed


def left_out(recipe: LoadedRecipe) -> str:
    """The reason of candidates that could run, were they not too many."""
    return f"left out: search.max_trials is {recipe.values.search.max_trials}"


def of_plan(recipe: LoadedRecipe, wanted: PlanRecipe, graph: Graph) -> Candidate:
    """The candidate of these degrees and this schedule alone, by the same checks."""
    space = SearchSpace(
        dp=[wanted.dp],
        tp=[wanted.tp],
        pp=[wanted.pp],
        micro_batch_size=[wanted.micro_batch_size],
        schedule=[wanted.schedule],
        allow_idle_devices=True,
    )
    training = recipe.values.training
    (candidate,) = candidates(
        space,
        cluster(recipe.values),
        lambda _: graph,
        global_batch=training.global_batch,
        seed=training.seed,
        clip_norm=training.clip_norm,
    )
    return candidate


def runnable(recipe: LoadedRecipe, found: Sequence[Candidate]) -> list[Plan]:
    """The plans of the candidates that have one; raises RecipeError, with the commonest reason, if none has."""
    plans = [candidate.plan for candidate in found if candidate.plan is not None]
    if not plans:
        reason, times = Counter(candidate.reason for candidate in found).most_common(1)[0]
        raise recipe.error("search", f"none of its {len(found)} candidates can run; {times} of them: {reason}")
    return plans


def listing(found: Sequence[Candidate], *, show_all: bool) -> str:
    """The plans to run as a table; the pruned candidates as lines of it or, else, those of one reason together."""
    headings = ["dp", "tp", "pp", "micro-\nbatch", "schedule"]
    if show_all:
        return tabulate([(*_cells(one), one.reason) for one in found], [*headings, "pruned because"])
    lines = [tabulate([_cells(one) for one in found if one.plan is not None], headings)]
    reasons = Counter(one.reason for one in found if one.plan is None)
    if reasons:
        lines += ["", "pruned, with one example of each reason (--all: all of them):"]
    for reason, times in reasons.most_common():
        dp, tp, pp, micro_batch_size, schedule = _cells(next(one for one in found if one.reason == reason))
        lines.append(f"  ×{times} {reason} (dp={dp} tp={tp} pp={pp} micro-batch={micro_batch_size} {schedule})")
    return "\n".join(lines)


def _cells(candidate: Candidate) -> tuple[int, int, int, int, str]:
    return candidate.dp, candidate.tp, candidate.pp, candidate.micro_batch_size, candidate.schedule
