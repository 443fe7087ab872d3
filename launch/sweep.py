"""A sweep: every plan of a recipe's search space as a trial, through submitit, with progress; skips what is done."""

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import submitit

from auto3d.capture.specialize import specialize
from auto3d.plan import Plan
from auto3d.runtime.measurement import Measurement, Status
from auto3d.search.space import Candidate, candidates
from launch.ranks import check_devices
from launch.recipe import LoadedRecipe
from launch.settings import cluster, exported_model, search_space
from launch.store import Trial, exclusive, private_folder, trial_of, write_whole
from launch.trial import run_trial

POLL_S = 0.1
JOB_MARGIN_S = 120.0  # that submitit gives a trial beyond its own time-out, for imports and capture
ERROR_LINES = 8
FINAL = (Status.OK, Status.OOM, Status.INFEASIBLE)  # results; the others may come out better another time


@dataclass(frozen=True)
class Ended:
    """A trial that ended just now."""

    trial: Trial
    measurement: Measurement
    number: int  # of those that this sweep ran, from 1
    total: int


def find_candidates(recipe: LoadedRecipe) -> list[Candidate]:
    """Every combination of the recipe's search space, with its plan or the reason why it has none."""
    values = recipe.values
    model = exported_model(recipe)
    return list(
        candidates(
            search_space(values),
            cluster(values),
            lambda micro_batch_size: specialize(model, micro_batch_size),
            global_batch=values.training.global_batch,
            seed=values.training.seed,
        )
    )


def runnable(recipe: LoadedRecipe, found: Sequence[Candidate]) -> list[Plan]:
    """The plans of the candidates that have one; raises RecipeError, with the commonest reason, if none has."""
    plans = [candidate.plan for candidate in found if candidate.plan is not None]
    if not plans:
        reason, times = Counter(candidate.reason for candidate in found).most_common(1)[0]
        problem = f"none of its {len(found)} candidates can run; {times} of them because {reason}"
        raise recipe.error("search", problem)
    return plans


def run_sweep(
    recipe: LoadedRecipe, *, retry: bool, on_start: Callable[[Trial], None], on_end: Callable[[Ended], None]
) -> None:
    """Run each trial of the sweep that has not ended; with ``retry`` also those that failed or timed out.

    On KeyboardInterrupt the running trials are ended; what has ended stays.
    """
    values = recipe.values
    if values.cluster.nodes > 1:
        raise recipe.error("cluster.nodes", f"found {values.cluster.nodes}; a sweep runs on one machine: it takes 1")
    plans = runnable(recipe, find_candidates(recipe))
    trials = [trial_of(recipe, plan) for plan in plans[: values.search.max_trials]]
    check_devices(recipe, max(trial.plan.ranks for trial in trials))
    with exclusive(recipe):
        pending = [trial for trial in trials if _to_run(trial, retry)]
        total = len(pending)
        running: dict[Trial, submitit.Job] = {}
        number = 0
        try:
            while pending or running:
                while pending and len(running) < values.launch.concurrent_trials:
                    trial = pending.pop(0)
                    on_start(trial)
                    running[trial] = _submit(trial, recipe)
                for trial in [trial for trial, job in running.items() if job.done()]:
                    number += 1
                    on_end(Ended(trial, _measurement(trial, running.pop(trial)), number, total))
                time.sleep(POLL_S)
        finally:
            for job in running.values():
                os.kill(int(job.job_id), signal.SIGKILL)  # submitit's controller; the trial and its ranks die with it
            while any(not job.done() for job in running.values()):
                time.sleep(POLL_S)


def _to_run(trial: Trial, retry: bool) -> bool:
    measurement = trial.measurement()
    return measurement is None or (retry and measurement.status not in FINAL)


def _submit(trial: Trial, recipe: LoadedRecipe) -> submitit.Job:
    trial.prepare(recipe)
    executor = submitit.LocalExecutor(folder=private_folder(trial.folder / "job"))
    executor.update_parameters(
        timeout_min=math.ceil((recipe.values.launch.trial_timeout_s + JOB_MARGIN_S) / 60),
        gpus_per_node=trial.plan.ranks if recipe.values.cluster.device == "cuda" else 0,
    )
    with _interrupts_kept():
        return executor.submit(run_trial, str(trial.recipe_file), str(trial.plan_file), str(trial.measurement_file))


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """What is started inside never sees the terminal's Ctrl-C: ending trials is this process's business alone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by what is started
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _measurement(trial: Trial, job: submitit.Job) -> Measurement:
    """What the trial wrote or, if it could not write, the last lines that it printed."""
    measurement = trial.measurement()
    if measurement is None:
        lines = (job.stderr() or "it printed nothing").rstrip().splitlines()
        measurement = Measurement(plan=trial.plan, status=Status.FAILED, error="\n".join(lines[-ERROR_LINES:]))
        write_whole(trial.measurement_file, measurement.to_json())
    return measurement
