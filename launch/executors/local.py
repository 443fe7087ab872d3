"""Trials on this machine, each in a process of its own; they end when the process that runs them does."""

import time
from collections.abc import Sequence
from types import TracebackType

from auto3d.runtime.measurement import Measurement, Status
from launch.executors.warm import LOGS, TrialCall, TrialEnd, WarmProcess
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import device, trial_limit_s
from launch.run.devices import device_pool
from launch.slurm.sbatch import MARGIN_S
from launch.store.manifest import Entry, State
from launch.store.trials import Trial, log_folder, manifest_of
from launch.store.watcher import Ended, Watcher, interrupts_noted, write_failure

POLL_S = 0.02


class LocalTrials:
    """Runs trials of ``recipe`` on this machine, all forked from one warm process.

    A context manager: at the end of the ``with`` no process of a trial is left.
    """

    def __init__(self, recipe: LoadedRecipe) -> None:
        self._recipe = recipe
        self._warm = WarmProcess(recipe)

    def __enter__(self) -> "LocalTrials":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._warm.kill()

    def run(self, pending: Sequence[Trial], watcher: Watcher) -> None:
        """Run ``pending`` a few at a time; ``watcher`` hears of each trial's start and end.

        A trial on GPUs has devices of its own, and waits until enough are free; raises RecipeError if there never are.
        On SIGINT or SIGTERM the running trials are killed, and KeyboardInterrupt is raised.
        """
        recipe, total, number = self._recipe, len(pending), 0
        pending = [*pending]
        gpus = {trial: trial.plan.ranks if device(recipe.values) == "cuda" else 0 for trial in pending}
        pool = device_pool(recipe, max(gpus.values(), default=0))
        running: dict[str, tuple[Trial, tuple[str, ...]]] = {}  # trials by name, with their devices
        manifest = manifest_of(recipe)
        with interrupts_noted() as interrupted:
            try:
                while pending or running:
                    if interrupted():
                        raise KeyboardInterrupt
                    may_start = pending and len(running) < recipe.values.launch.concurrent_trials
                    if may_start and (devices := pool.take(gpus[pending[0]])) is not None:
                        trial = pending.pop(0)
                        running[trial.name] = (trial, devices)
                        watcher.start(trial)
                        manifest.append([Entry(trial=trial.name, state=State.STARTED)])
                        self._start(trial, devices)
                        continue
                    for end in self._warm.ends():
                        number += 1
                        trial, devices = running.pop(end.name)
                        measurement = self._measurement(trial, end)
                        pool.give_back(devices)
                        manifest.append([Entry(trial=trial.name, state=State.ENDED, told=measurement.status)])
                        watcher.end(Ended(trial, measurement, number, total))
                    time.sleep(POLL_S)
            finally:
                if running:
                    self._warm.kill()
        if interrupted():  # just when the last trial had ended: whoever runs one after the other must not go on
            raise KeyboardInterrupt

    def _start(self, trial: Trial, devices: tuple[str, ...]) -> None:
        trial.prepare()
        call = TrialCall(
            name=trial.name,
            plan=trial.plan,
            measurement_file=trial.measurement_file.resolve(),
            log_folder=log_folder(self._recipe, trial.name),
            devices=devices,
            deadline=time.monotonic() + self._limit_s,
        )
        self._warm.start(call)

    @property
    def _limit_s(self) -> float:
        """Seconds for a trial; its ranks have their own, shorter limit, so only what is no rank reaches this limit."""
        return trial_limit_s(self._recipe.values) + MARGIN_S

    def _measurement(self, trial: Trial, end: TrialEnd) -> Measurement:
        """What the trial wrote or, if it could not write, the last lines that it printed and how it ended."""
        if (measurement := trial.measurement()) is not None:
            return measurement
        printed = (log_folder(self._recipe, trial.name) / LOGS[1]).read_text(errors="replace").rstrip()
        status, problem = Status.FAILED, end.problem or "it printed nothing"
        if end.timed_out:
            status, problem = Status.TIMEOUT, f"it did not end within {self._limit_s:g} s: {end.problem}"
        if status is Status.FAILED and printed and "was killed" not in problem:
            problem = ""  # the last lines of what it printed say why
        return write_failure(trial, status, "\n".join(filter(None, [printed, problem])))
