"""A sweep: every plan of a recipe's search space as a trial, through submitit, with progress; skips what is done."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import submitit

from auto3d.capture.graph import Graph
from auto3d.runtime.measurement import Measurement, Status
from auto3d.schedule import samples_at_once
from launch import candidates
from launch.model import captured_model, initial_weights
from launch.ranks import check_devices
from launch.recipe import LoadedRecipe
from launch.settings import device, emulation
from launch.store import Trial, exclusive, private_folder, trials_of, write_sweep, write_whole
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


class Watcher(Protocol):
    """What is told how a sweep goes."""

    def begin(self, total: int, kept: Sequence[tuple[Trial, Measurement]], left_out: int) -> None:
        """Before the first of ``total`` trials; those ``kept`` ended earlier, and ``left_out`` plans do not run."""

    def start(self, trial: Trial) -> None: ...

    def end(self, ended: Ended) -> None: ...


def run_sweep(recipe: LoadedRecipe, *, retry: bool, watcher: Watcher) -> None:
    """Run each trial of the sweep that has not ended; with ``retry`` also those that failed or timed out.

    On SIGINT or SIGTERM the running trials are ended, and KeyboardInterrupt is raised; what has ended stays.
    """
    values = recipe.values
    check_one_machine(recipe)

    @cache
    def graph_at(micro_batch_size: int) -> Graph:
        return captured_model(recipe, micro_batch_size).graph

    found = candidates.find(recipe, graph_at)
    left_out = sum(candidate.reason == candidates.left_out(recipe) for candidate in found)
    plans = candidates.runnable(recipe, found)
    check_devices(recipe, max(plan.ranks for plan in plans))
    if values.model.weights is not None:
        initial_weights(recipe, graph_at(samples_at_once(plans[0])))
    trials = trials_of(recipe, plans)
    with exclusive(recipe):
        write_sweep(recipe, trials, left_out=left_out)
        ended = {trial: measurement for trial in trials if (measurement := trial.measurement()) is not None}
        kept = {trial: one for trial, one in ended.items() if one.status in FINAL or not retry}
        pending = [trial for trial in trials if trial not in kept]
        watcher.begin(len(pending), list(kept.items()), left_out)
        run_trials(recipe, pending, watcher)


def check_one_machine(recipe: LoadedRecipe) -> None:
    nodes = recipe.values.cluster.nodes
    if nodes > 1:
        raise recipe.error("cluster.nodes", f"found {nodes}; a sweep runs on one machine: it takes 1")


def run_trials(recipe: LoadedRecipe, pending: list[Trial], watcher: Watcher) -> None:
    """Run ``pending``, which it empties, a few at a time; ``watcher`` hears of the start and the end of each."""
    total = len(pending)
    running: dict[Trial, submitit.Job] = {}
    number = 0
    with _interrupts_noted() as interrupted:
        try:
            while pending or running:
                if interrupted():
                    raise KeyboardInterrupt
                if pending and len(running) < recipe.values.launch.concurrent_trials:
                    trial = pending.pop(0)
                    watcher.start(trial)
                    running[trial] = _submit(trial, recipe)
                    continue
                for trial in [trial for trial, job in running.items() if job.done()]:
                    number += 1
                    watcher.end(Ended(trial, _measurement(recipe, trial, running.pop(trial)), number, total))
                time.sleep(POLL_S)
        finally:
            for job in running.values():
                os.kill(int(job.job_id), signal.SIGKILL)  # submitit's controller; the trial and its ranks die with it
            while any(not job.done() for job in running.values()):
                time.sleep(POLL_S)


@contextmanager
def _interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Only note SIGINT and SIGTERM, so that no trial starts without being known; yields whether one came."""
    noted: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: noted.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: bool(noted)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _submit(trial: Trial, recipe: LoadedRecipe) -> submitit.Job:
    trial.prepare(recipe)
    executor = submitit.LocalExecutor(folder=private_folder(trial.folder / "job"))
    executor.update_parameters(
        timeout_min=math.ceil((recipe.values.launch.trial_timeout_s + JOB_MARGIN_S) / 60),
        gpus_per_node=trial.plan.ranks if device(recipe.values) == "cuda" else 0,
    )
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
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _measurement(recipe: LoadedRecipe, trial: Trial, job: submitit.Job) -> Measurement:
    """What the trial wrote or, if it could not write, the last lines that it printed."""
    measurement = trial.measurement()
    if measurement is None:
        lines = (job.stderr() or "it printed nothing").rstrip().splitlines()
        measurement = Measurement(
            plan=trial.plan,
            status=Status.FAILED,
            emulated=emulation(recipe.values) is not None,
            error="\n".join(lines[-ERROR_LINES:]),
        )
        write_whole(trial.measurement_file, measurement.to_json())
    return measurement
