"""Trials on this machine, each in a process of its own by submitit; they end when the process that runs them does."""

import math
import os
import signal
import time
from collections.abc import Sequence

import submitit

from auto3d.runtime.measurement import Measurement, Status
from launch.executors.trial import run_trial
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import device
from launch.run.devices import device_pool
from launch.slurm.sbatch import MARGIN_S
from launch.store.files import private_folder
from launch.store.manifest import Entry, State
from launch.store.trials import Trial, manifest_of
from launch.store.watcher import Ended, Watcher, interrupts_noted, write_failure

POLL_S = 0.1


def run(recipe: LoadedRecipe, pending: list[Trial], watcher: Watcher) -> None:
    """Run ``pending``, which it empties, a few at a time; ``watcher`` hears of the start and the end of each.

    A trial on GPUs has devices of its own, and waits until enough are free; raises RecipeError if there never are.
    """
    total = len(pending)
    running: dict[Trial, submitit.Job] = {}
    gpus = {trial: trial.plan.ranks if device(recipe.values) == "cuda" else 0 for trial in pending}
    pool = device_pool(recipe, max(gpus.values(), default=0))
    devices: dict[Trial, tuple[str, ...]] = {}
    number = 0
    manifest = manifest_of(recipe)
    with interrupts_noted() as interrupted:
        try:
            while pending or running:
                if interrupted():
                    raise KeyboardInterrupt
                may_start = pending and len(running) < recipe.values.launch.concurrent_trials
                if may_start and (taken := pool.take(gpus[pending[0]])) is not None:
                    trial = pending.pop(0)
                    devices[trial] = taken
                    watcher.start(trial)
                    manifest.append([Entry(trial=trial.name, state=State.STARTED)])
                    running[trial] = _submit(trial, recipe, taken)
                    continue
                for trial in [trial for trial, job in running.items() if job.done()]:
                    number += 1
                    measurement = _measurement(recipe, trial, running.pop(trial))
                    pool.give_back(devices.pop(trial))
                    manifest.append([Entry(trial=trial.name, state=State.ENDED, told=measurement.status)])
                    watcher.end(Ended(trial, measurement, number, total))
                time.sleep(POLL_S)
        finally:
            for job in running.values():
                os.kill(int(job.job_id), signal.SIGKILL)  # submitit's controller; the trial and its ranks die with it
            while any(not job.done() for job in running.values()):
                time.sleep(POLL_S)
    if interrupted():  # just when the last trial had ended: whoever runs one after the other must not go on
        raise KeyboardInterrupt


def _submit(trial: Trial, recipe: LoadedRecipe, devices: Sequence[str]) -> submitit.Job:
    trial.prepare(recipe)
    executor = submitit.LocalExecutor(folder=private_folder(trial.folder / "job"))
    executor.update_parameters(timeout_min=math.ceil((recipe.values.launch.trial_timeout_s + MARGIN_S) / 60))
    # A trial never sees the terminal's Ctrl-C, for it inherits this mask: to end it is this process's business alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return executor.submit(
            run_trial,
            str(trial.recipe_file),
            str(trial.plan_file),
            str(trial.measurement_file),
            modules=str(recipe.folder),
            sweep=os.getpid(),
            devices=devices,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _measurement(recipe: LoadedRecipe, trial: Trial, job: submitit.Job) -> Measurement:
    """What the trial wrote or, if it could not write, the last lines that it printed."""
    known = trial.measurement()
    return known or write_failure(recipe, trial, Status.FAILED, job.stderr() or "it printed nothing")
