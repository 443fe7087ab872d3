"""A sweep: every plan of a recipe's search space as a trial; trials that have ended do not run again."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from enum import Enum, auto
from typing import Any

from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.measurement import Measurement, Status
from auto3d.schedule import samples_at_once
from auto3d.search.axes import Candidate
from auto3d.search.space import Domain
from launch.drivers.planners import plans_of_planners
from launch.executors.submit import ask, most_at_once, starts_of, submissions
from launch.executors.trial_executor import TrialExecutor, executor_of
from launch.model.candidates import task
from launch.model.capture_process import CaptureProcess
from launch.model.check_capture import check_plans
from launch.model.graphs import PlanningModel
from launch.model.predictions import PlanPredictions, predict_plans
from launch.model.sweep_plans import SweepPlans, plans_of_sweep
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema_key import AUTO
from launch.recipe.settings import cluster, device, search_space
from launch.run.scaled_down import devices_of, what_helps
from launch.slurm.executor import check_reachable, on_slurm
from launch.slurm.sbatch import check_launch
from launch.store.ends import record_ends
from launch.store.trials import (
    PLANNER,
    Command,
    SweepRecord,
    Trial,
    candidate_in,
    last_sweep,
    recipe_folder,
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
    candidates: dict[Plan, dict[str, Any]]  # fields of the Candidate of each of these plans, and PLANNER

    @property
    def every(self) -> list[Trial]:
        """Its trials, and records that only say why a peer cannot train a plan."""
        return [*self.trials, *self.infeasible]

    def ended(self) -> dict[Trial, Measurement]:
        """The measurements of the trials that have ended."""
        return {trial: measurement for trial in self.every if (measurement := trial.measurement()) is not None}


def sweep_of(
    recipe: LoadedRecipe,
    tell: Callable[[str], None] | None = None,
    *,
    only_planners: bool = False,
    process: CaptureProcess | None = None,
) -> Sweep:
    """The trials of ``recipe``; with ``only_planners``, the trials of search.planners alone.

    With ``tell`` their captures are checked, too, and ``tell`` receives each result; then their times are predicted.
    Models are captured in ``process`` if there is one, which several sweeps may share.
    """
    check_fewest_ranks(recipe)
    predictions = PlanPredictions({}, "")
    with CaptureProcess() if process is None else nullcontext(process) as process:
        model = PlanningModel(recipe, process=process)
        swept = SweepPlans(candidates={})
        if not only_planners:
            swept = plans_of_sweep(model, before=_chosen_before(recipe))
        planned = plans_of_planners(model, tell or (lambda line: None), before=_planned_before(recipe))
        chosen = {plan: candidate for plan, (candidate, _) in planned.items()} | swept.candidates
        if not (plans := list(chosen)):
            raise recipe.error("search.planners", f"none of {', '.join(recipe.values.search.planners)} has a plan")
        check_ranks(recipe, max(plan.ranks for plan in plans))
        if tell is not None:
            _tell_of_algorithm(recipe, tell)
            check_plans(recipe, plans, process, tell)
            predictions = predict_plans(model, plans)
    if recipe.values.model.weights is not None:
        from launch.model.initial_weights import initial_weights  # torch is slow to import, and large

        initial_weights(recipe, model.graph(samples_at_once(plans[0])))
    infeasible = {trial: swept.infeasible[trial.plan].reason for trial in trials_of(recipe, list(swept.infeasible))}
    every = chosen | {plan: refused.candidate for plan, refused in swept.infeasible.items()}
    planners = {plan: names for plan, (_, names) in planned.items()}
    candidates = {plan: asdict(candidate) | {PLANNER: planners.get(plan, "")} for plan, candidate in every.items()}
    return Sweep(trials_of(recipe, plans), swept.left_out, predictions, infeasible, candidates)


def _tell_of_algorithm(recipe: LoadedRecipe, tell: Callable[[str], None]) -> None:
    """Say what search.algorithm is to a sweep, where a recipe sets it and its planner has no row."""
    search = recipe.values.search
    if search.algorithm not in (AUTO, *search.planners):
        tell(
            f"search.algorithm = {search.algorithm} only says which candidates search.max_trials leaves; to run its "
            f"own plan too: search.planners=[{search.algorithm}]"
        )


def _chosen_before(recipe: LoadedRecipe) -> list[Candidate]:
    """The candidates of the last sweep of the same settings.

    A sweep continues with the same plans, even if measurements since then have changed the predictions.
    """
    sweep = last_sweep(recipe)
    if sweep is None:
        return []
    names = sweep.trials_of(settings_digest(recipe))
    return [candidate_in(sweep.candidates[name]) for name in names if name in sweep.candidates]


def _planned_before(recipe: LoadedRecipe) -> dict[str, tuple[Plan, Candidate]]:
    """The plans that search.planners had in the last sweep of the same settings, as far as their trials have begun."""
    sweep, planned = last_sweep(recipe), dict[str, tuple[Plan, Candidate]]()
    for name in [] if sweep is None else sweep.trials_of(settings_digest(recipe)):
        fields = sweep.candidates.get(name, {}) if sweep is not None else {}
        if planners := fields.get(PLANNER):
            with suppress(OSError):
                plan = Plan.from_json((recipe_folder(recipe) / "trials" / name / "plan.json").read_text())
                planned |= {planner: (plan, candidate_in(fields)) for planner in planners.split(", ")}
    return planned


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
    _run(recipe, [(recipe, sweep)], Command("sweep", [*recipe.overrides]), retry, watcher, follow=follow)
    return sweep


def run_grid(
    recipes: Sequence[LoadedRecipe], command: Command, *, retry: Retry, watcher: Watcher, follow: bool = True
) -> list[Sweep | InputError]:
    """Run the sweeps of ``recipes``, which have one name and so one store, beside each other, as ``run_sweep`` does.

    The trials of all are submitted together, and a trial that two have in common runs once. Of a recipe that names
    search.planners only their plans run. Gives the sweep of each recipe, or why it has none; raises that error if none
    has any, for more than a lack of memory. ``command`` is what `auto3d resume` shall run.
    """
    results: list[Sweep | InputError] = []
    with CaptureProcess() as process:
        for recipe in recipes:
            try:
                check_place(recipe)
                only = bool(recipe.values.search.planners)
                results.append(sweep_of(recipe, watcher.tell, only_planners=only, process=process))
            except InputError as error:
                results.append(error)
    sweeps = [(recipe, sweep) for recipe, sweep in zip(recipes, results, strict=True) if isinstance(sweep, Sweep)]
    problems = [problem for problem in results if isinstance(problem, InputError) and problem.kind != "memory"]
    if problems and not sweeps:
        raise problems[0]
    if sweeps:
        _run(recipes[0], sweeps, command, retry, watcher, follow=follow)
    return results


def _run(
    store: LoadedRecipe,
    sweeps: Sequence[tuple[LoadedRecipe, Sweep]],
    command: Command,
    retry: Retry,
    watcher: Watcher,
    *,
    follow: bool,
) -> None:
    """Record ``sweeps`` in the store of the recipe ``store``, and run their trials that have not ended."""
    with executor_of(store) as executor:
        write_command(store, command)
        write_sweep(store, _record(sweeps))
        for _, sweep in sweeps:
            for trial, reason in sweep.infeasible.items():
                trial.prepare()
                write_failure(trial, Status.INFEASIBLE, reason)
        ended = {trial: measurement for _, sweep in sweeps for trial, measurement in sweep.ended().items()}
        record_ends(store, ended)  # some may have ended while no process followed them
        kept = kept_of(store, ended, retry)
        trials = list(dict.fromkeys(trial for _, sweep in sweeps for trial in sweep.trials))
        pending = [trial for trial in trials if trial not in kept]
        left_out = sweeps[0][1].left_out if len(sweeps) == 1 else 0  # several sweeps run few plans each by design
        watcher.begin(len(pending), [(trial, kept[trial]) for trial in trials if trial in kept], left_out)
        executor.run(pending, watcher, known=ended, follow=follow)


def _record(sweeps: Sequence[tuple[LoadedRecipe, Sweep]]) -> SweepRecord:
    """What the store keeps of ``sweeps``."""
    first, single = sweeps[0][0], len(sweeps) == 1
    names = {settings_digest(recipe): [trial.name for trial in sweep.every] for recipe, sweep in sweeps}
    seconds = [(trial, sweep.predictions.seconds) for _, sweep in sweeps for trial in sweep.every]
    return SweepRecord(
        overrides=[*first.overrides] if single else [],
        settings=settings_digest(first) if single else "",
        trials=[*dict.fromkeys(name for trial_names in names.values() for name in trial_names)],
        left_out=sum(sweep.left_out for _, sweep in sweeps),
        predicted_s={
            trial.name: predicted_s[trial.plan] for trial, predicted_s in seconds if trial.plan in predicted_s
        },
        predicted_on=next((sweep.predictions.based_on for _, sweep in sweeps), ""),
        profiled=all(sweep.predictions.profiled for _, sweep in sweeps),
        candidates={trial.name: sweep.candidates[trial.plan] for _, sweep in sweeps for trial in sweep.every},
        rows={} if single else names,
    )


def kept_of(recipe: LoadedRecipe, ended: Mapping[Trial, Measurement], retry: Retry) -> dict[Trial, Measurement]:
    """The ``ended`` trials that do not run again."""
    again = runs_again(recipe, retry)
    return {
        trial: measurement for trial, measurement in ended.items() if measurement.status in FINAL or not again(trial)
    }


def left_of(recipe: LoadedRecipe, retry: Retry, *, only_planners: bool = False) -> list[Trial]:
    """The trials of the sweep that have yet to run."""
    sweep = sweep_of(recipe, only_planners=only_planners)
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
    pending = submissions(recipe, trials(recipe), starts_of(recipe), most_at_once(recipe))
    if not pending:
        print("all trials have ended: there is no job to submit", file=sys.stderr)
    for submission in pending:
        print(ask(submission) if ask_slurm else submission.text)


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
        check_ranks(recipe, min(candidate.dp * candidate.tp * candidate.pp for candidate in degrees), verb)


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
