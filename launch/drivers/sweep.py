"""A sweep: every plan of a recipe's search space as a trial, here or on SLURM, with progress; skips what is done."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache, partial
from types import MappingProxyType

from auto3d.plan import Plan
from auto3d.runtime.measurement import Measurement
from auto3d.schedule import samples_at_once
from launch.executors.follow import follow_jobs, note_ends
from launch.executors.submit import ask, starts_of, submissions, submit
from launch.model import candidates
from launch.model.capture_process import CaptureProcess
from launch.model.check_capture import check_plans
from launch.model.graphs import PlanningModel
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import cluster
from launch.slurm.executor import check_reachable, on_slurm
from launch.slurm.sbatch import check_launch
from launch.store.trials import (
    Trial,
    exclusive,
    last_sweep,
    settings_digest,
    trials_of,
    write_command,
    write_sweep,
)
from launch.store.watcher import FINAL, Watcher

EMPTY: Mapping[Trial, Measurement] = MappingProxyType({})


@dataclass(frozen=True)
class Sweep:
    """What a sweep consists of."""

    trials: list[Trial]
    left_out: int  # plans beyond search.max_trials

    def ended(self) -> dict[Trial, Measurement]:
        """What those gave that have ended."""
        return {trial: measurement for trial in self.trials if (measurement := trial.measurement()) is not None}


def sweep_of(recipe: LoadedRecipe, tell: Callable[[str], None] | None = None) -> Sweep:
    """The trials of ``recipe``; to run them, give ``tell``: it hears how each capture was checked."""
    with CaptureProcess() as process:
        graph_at = cache(PlanningModel(recipe, process=process).graph)
        found = candidates.find(recipe, graph_at, partial(_chosen_before, recipe))
        left_out = sum(candidate.reason == candidates.left_out(recipe) for candidate in found)
        plans = candidates.runnable(recipe, found)
        check_ranks(recipe, max(plan.ranks for plan in plans))
        if tell is not None:
            check_plans(recipe, plans, process, tell)
    if recipe.values.model.weights is not None:
        from launch.model.build import initial_weights  # torch is slow to import, and large

        initial_weights(recipe, graph_at(samples_at_once(plans[0])))
    return Sweep(trials_of(recipe, plans), left_out)


def _chosen_before(recipe: LoadedRecipe, plans: Sequence[Plan]) -> set[Plan]:
    """Those of ``plans`` that the last sweep of the same settings chose: it goes on with them, whatever was measured
    since that changes predictions."""
    sweep = last_sweep(recipe)
    if sweep is None or sweep.settings != settings_digest(recipe):
        return set()
    names = set(sweep.trials)
    return {trial.plan for trial in trials_of(recipe, plans) if trial.name in names}


class Retry(Enum):
    """Which of the trials that failed or timed out run again."""

    NONE = auto()
    ALL = auto()
    UP_TO_A_LIMIT = auto()  # those that were started fewer than launch.attempts times


def runs_again(recipe: LoadedRecipe, retry: Retry) -> Callable[[Trial], bool]:
    """Tells of a trial that failed or timed out whether it runs again."""
    starts = starts_of(recipe)
    limit = {Retry.NONE: 0, Retry.ALL: math.inf, Retry.UP_TO_A_LIMIT: recipe.values.launch.attempts}[retry]
    return lambda trial: starts.get(trial.name, 0) < limit


def run_sweep(recipe: LoadedRecipe, *, retry: Retry, watcher: Watcher, follow: bool = True) -> Sweep:
    """Run each trial of the sweep that has not ended, and those that failed as far as ``retry`` says; returns it.

    On SIGINT or SIGTERM KeyboardInterrupt is raised; what has ended stays. Trials that run here are ended then, jobs of
    SLURM go on.
    """
    check_place(recipe)
    sweep = sweep_of(recipe, watcher.tell)
    trials = sweep.trials
    with held(recipe):
        write_command(recipe, "sweep")
        write_sweep(recipe, trials, left_out=sweep.left_out)
        ended = sweep.ended()
        note_ends(recipe, ended)  # some ended while nobody followed them
        kept = kept_of(recipe, ended, retry)
        pending = [trial for trial in trials if trial not in kept]
        watcher.begin(len(pending), list(kept.items()), sweep.left_out)
        run_trials(recipe, pending, watcher, known=ended, follow=follow)
    return sweep


def kept_of(recipe: LoadedRecipe, ended: Mapping[Trial, Measurement], retry: Retry) -> dict[Trial, Measurement]:
    """Those of the ``ended`` trials that do not run again."""
    again = runs_again(recipe, retry)
    return {trial: one for trial, one in ended.items() if one.status in FINAL or not again(trial)}


def left_of(recipe: LoadedRecipe, retry: Retry) -> list[Trial]:
    """The trials of the sweep that would run."""
    sweep = sweep_of(recipe)
    kept = kept_of(recipe, sweep.ended(), retry)
    return [trial for trial in sweep.trials if trial not in kept]


def print_submissions(
    recipe: LoadedRecipe, trials: Callable[[LoadedRecipe], Sequence[Trial]], *, ask_slurm: bool
) -> None:
    """Print the sbatch text of each job of ``trials``, if any, or, to ``ask_slurm``, what the scheduler says to it."""
    launch = replace(recipe.values.launch, executor="slurm")
    recipe = replace(recipe, values=replace(recipe.values, launch=launch))
    check_launch(recipe)
    if ask_slurm:
        check_reachable(recipe)
    found = submissions(recipe, trials(recipe), starts_of(recipe))
    if not found:
        print("all trials have ended: there is no job to submit", file=sys.stderr)
    for submission in found:
        print(ask(recipe, submission) if ask_slurm else submission.text(recipe))


def held(recipe: LoadedRecipe) -> AbstractContextManager[None]:
    """The recipe's store, for as long as trials run on this machine; jobs of SLURM may belong to several sweeps."""
    return nullcontext() if on_slurm(recipe) else exclusive(recipe)


def check_place(recipe: LoadedRecipe) -> None:
    """Raise RecipeError if trials cannot run where the recipe says."""
    check_launch(recipe)
    check_reachable(recipe)
    nodes = len(cluster(recipe).nodes)
    if nodes > 1 and not on_slurm(recipe):
        problem = f"found {nodes}; trials run on this machine, which is 1; launch.executor=slurm takes several"
        raise recipe.error("cluster.nodes", problem)


def check_ranks(recipe: LoadedRecipe, ranks: int) -> None:
    """Raise RecipeError if the devices of trials of so many ranks would be this machine's, and are not there."""
    if not on_slurm(recipe):
        from launch.run.ranks import check_devices

        check_devices(recipe, ranks)


def measured(recipe: LoadedRecipe, trial: Trial, watcher: Watcher, *, retry: Retry) -> Measurement:
    """The result of ``trial``, which runs unless it has one; one that failed or timed out as ``retry`` says."""
    known = trial.measurement()
    if known is None or (known.status not in FINAL and runs_again(recipe, retry)(trial)):
        run_trials(recipe, [trial], watcher, known={} if known is None else {trial: known})
        known = trial.measurement()
    return known


def run_trials(
    recipe: LoadedRecipe,
    pending: list[Trial],
    watcher: Watcher,
    *,
    known: Mapping[Trial, Measurement] = EMPTY,
    follow: bool = True,
) -> None:
    """Run ``pending`` where the recipe says; ``watcher`` hears of the start and the end of each.

    ``known`` are measurements of earlier runs that these replace. Unless it is to ``follow``, it only submits.
    """
    if not on_slurm(recipe):
        from launch.executors import local

        local.run(recipe, pending, watcher)
        return
    jobs = submit(recipe, pending, known, watcher)
    if follow:
        follow_jobs(recipe, jobs, watcher)
