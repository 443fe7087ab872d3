"""A sweep: every plan of a recipe's search space as a trial; trials that have ended do not run again."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum, auto
from functools import cache
from typing import Any

from auto3d.plan import Plan
from auto3d.runtime.measurement import Measurement, Status
from auto3d.schedule import samples_at_once
from auto3d.search.axes import Candidate
from auto3d.search.space import Domain
from launch.executors.submit import ask, starts_of, submissions
from launch.executors.trial_executor import TrialExecutor, executor_of
from launch.model.candidates import task
from launch.model.capture_process import CaptureProcess
from launch.model.check_capture import check_plans
from launch.model.graphs import PlanningModel
from launch.model.predictions import PlanPredictions, predict_plans
from launch.model.sweep_plans import plans_of_sweep
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import cluster, device, search_space
from launch.run.scaled_down import devices_of, what_helps
from launch.slurm.executor import check_reachable, on_slurm
from launch.slurm.sbatch import check_launch
from launch.store.ends import record_ends
from launch.store.trials import (
    Trial,
    last_sweep,
    settings_digest,
    trials_of,
    write_command,
    write_sweep,
)
from launch.store.watcher import FINAL, Watcher, write_failure


@dataclass(frozen=True)
class Sweep:
    """The trials of a sweep."""

    trials: list[Trial]
    left_out: int  # number of candidates beyond search.max_trials
    predictions: PlanPredictions
    infeasible: dict[Trial, str]  # plans that a peer cannot train, with the reasons
    candidates: dict[Plan, dict[str, Any]]  # fields of the Candidate of each of these plans

    def ended(self) -> dict[Trial, Measurement]:
        """The measurements of the trials that have ended."""
        every = [*self.trials, *self.infeasible]
        return {trial: measurement for trial in every if (measurement := trial.measurement()) is not None}


def sweep_of(recipe: LoadedRecipe, tell: Callable[[str], None] | None = None) -> Sweep:
    """The trials of ``recipe``.

    With ``tell`` their captures are checked, too, and ``tell`` receives each result; then their times are predicted.
    """
    check_fewest_ranks(recipe)
    predictions = PlanPredictions({}, "")
    with CaptureProcess() as process:
        model = PlanningModel(recipe, process=process)
        graph_at = cache(model.graph)
        found = plans_of_sweep(recipe, graph_at, model, before=_chosen_before(recipe), process=process)
        plans = list(found.candidates)
        check_ranks(recipe, max(plan.ranks for plan in plans))
        if tell is not None:
            check_plans(recipe, plans, process, tell)
            predictions = predict_plans(recipe, plans, graph_at, model)
    if recipe.values.model.weights is not None:
        from launch.model.initial_weights import initial_weights  # torch is slow to import, and large

        initial_weights(recipe, graph_at(samples_at_once(plans[0])))
    infeasible = {trial: found.infeasible[trial.plan].reason for trial in trials_of(recipe, list(found.infeasible))}
    every = found.candidates | {plan: one.candidate for plan, one in found.infeasible.items()}
    candidates = {plan: asdict(candidate) for plan, candidate in every.items()}
    return Sweep(trials_of(recipe, plans), found.left_out, predictions, infeasible, candidates)


def _chosen_before(recipe: LoadedRecipe) -> list[Candidate]:
    """The candidates of the last sweep of the same settings.

    A sweep continues with the same plans, even if measurements since then have changed the predictions.
    """
    sweep = last_sweep(recipe)
    if sweep is None or sweep.settings != settings_digest(recipe):
        return []
    return [Candidate(**sweep.candidates[name]) for name in sweep.trials if name in sweep.candidates]


class Retry(Enum):
    """Which of the trials that failed or timed out run again."""

    NONE = auto()
    ALL = auto()
    UP_TO_A_LIMIT = auto()  # only trials that were started fewer than launch.attempts times


def runs_again(recipe: LoadedRecipe, retry: Retry) -> Callable[[Trial], bool]:
    """A function that says whether a trial that failed or timed out runs again."""
    starts = starts_of(recipe)
    limit = {Retry.NONE: 0, Retry.ALL: math.inf, Retry.UP_TO_A_LIMIT: recipe.values.launch.attempts}[retry]
    return lambda trial: starts.get(trial.name, 0) < limit


def run_sweep(recipe: LoadedRecipe, *, retry: Retry, watcher: Watcher, follow: bool = True) -> Sweep:
    """Run the trials of the sweep that have not ended, and failed ones as ``retry`` says; returns the sweep.

    SIGINT and SIGTERM raise KeyboardInterrupt. Results are kept, trials on this machine are killed, SLURM jobs go on.
    """
    check_place(recipe)
    sweep = sweep_of(recipe, watcher.tell)
    trials = sweep.trials
    with executor_of(recipe) as executor:
        write_command(recipe, "sweep")
        write_sweep(
            recipe,
            [*trials, *sweep.infeasible],
            left_out=sweep.left_out,
            predicted_s=sweep.predictions.seconds,
            predicted_on=sweep.predictions.based_on,
            candidates=sweep.candidates,
        )
        for trial, reason in sweep.infeasible.items():
            trial.prepare(recipe)
            write_failure(recipe, trial, Status.INFEASIBLE, reason)
        ended = sweep.ended()
        record_ends(recipe, ended)  # some may have ended while no process followed them
        kept = kept_of(recipe, ended, retry)
        pending = [trial for trial in trials if trial not in kept]
        watcher.begin(len(pending), [(trial, kept[trial]) for trial in trials if trial in kept], sweep.left_out)
        executor.run(pending, watcher, known=ended, follow=follow)
    return sweep


def kept_of(recipe: LoadedRecipe, ended: Mapping[Trial, Measurement], retry: Retry) -> dict[Trial, Measurement]:
    """The ``ended`` trials that do not run again."""
    again = runs_again(recipe, retry)
    return {trial: one for trial, one in ended.items() if one.status in FINAL or not again(trial)}


def left_of(recipe: LoadedRecipe, retry: Retry) -> list[Trial]:
    """The trials of the sweep that have yet to run."""
    sweep = sweep_of(recipe)
    kept = kept_of(recipe, sweep.ended(), retry)
    return [trial for trial in sweep.trials if trial not in kept]


def print_submissions(
    recipe: LoadedRecipe, trials: Callable[[LoadedRecipe], Sequence[Trial]], *, ask_slurm: bool
) -> None:
    """Print the sbatch script of each job for ``trials`` or, with ``ask_slurm``, the scheduler's answer to it."""
    launch = replace(recipe.values.launch, executor="slurm")
    recipe = replace(recipe, values=replace(recipe.values, launch=launch))
    check_launch(recipe)
    if ask_slurm:
        check_reachable(recipe)
    pending = submissions(recipe, trials(recipe), starts_of(recipe))
    if not pending:
        print("all trials have ended: there is no job to submit", file=sys.stderr)
    for submission in pending:
        print(ask(recipe, submission) if ask_slurm else submission.text(recipe))


def check_place(recipe: LoadedRecipe, verb: str = "sweep") -> None:
    """Raise RecipeError if ``verb`` cannot run on the executor that the recipe names."""
    check_launch(recipe)
    check_reachable(recipe)
    nodes = len(cluster(recipe).nodes)
    if nodes > 1 and not on_slurm(recipe):
        problem = f"found {nodes}; the recipe needs {devices_of(recipe)}, and this machine is 1 node"
        problem += f": {what_helps(recipe, verb)}"
        raise recipe.error("cluster.nodes", problem)


def check_ranks(recipe: LoadedRecipe, ranks: int, verb: str = "sweep") -> None:
    """Raise RecipeError if trials of ``ranks`` ranks would run on this machine and it lacks the devices."""
    if device(recipe.values) == "cuda" and not on_slurm(recipe):
        from launch.run.ranks import check_devices  # imports torch

        check_devices(recipe, ranks, verb)


def check_fewest_ranks(recipe: LoadedRecipe, verb: str = "sweep") -> None:
    """As ``check_ranks``, for the search space's smallest plan: its ranks are known before the model is captured."""
    if device(recipe.values) != "cuda":
        return
    degrees = Domain(search_space(recipe.values), cluster(recipe), task(recipe)).degrees
    if degrees:
        check_ranks(recipe, min(one.dp * one.tp * one.pp for one in degrees), verb)


def measured(
    recipe: LoadedRecipe, trial: Trial, executor: TrialExecutor, watcher: Watcher, *, retry: Retry
) -> Measurement:
    """The measurement of ``trial``, which runs if it has none, or if it failed and ``retry`` says so."""
    known = trial.measurement()
    if known is None or (known.status not in FINAL and runs_again(recipe, retry)(trial)):
        executor.run([trial], watcher, known={} if known is None else {trial: known})
        known = trial.measurement()
    assert known is not None
    return known
