"""The warm process: it imports torch, captures the model once for each micro-batch size, and forks each trial.

A trial dies with this process, and its ranks die with the trial. A trial that fails ends itself alone.
"""

import multiprocessing
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

import torch

from launch.executors.trial import measure
from launch.executors.warm import TrialCall, TrialEnd, how_it_ended, open_logs
from launch.model.build import RankCaptures
from launch.recipe.load import LoadedRecipe
from launch.run.devices import show_devices
from launch.run.ranks import die_with_parent
from launch.store.files import write_whole


@dataclass
class _Running:
    """A trial that was forked."""

    call: TrialCall
    process: ForkProcess
    timed_out: bool = False


def serve(pipe: Connection) -> None:
    """Fork a trial for each call from ``pipe``, and report each end there, until its other end is closed.

    Trials and their ranks inherit this end of the pipe and never close it: by that the driver sees that all have ended.
    """
    os.set_inheritable(pipe.fileno(), False)  # by what they fork, but not by programs that they start
    torch.set_num_threads(1)  # a pool of threads would not outlive a fork; each rank sets its own number
    recipe: LoadedRecipe = pipe.recv()
    captures = RankCaptures(recipe)
    running: dict[int, _Running] = {}  # by the descriptor that becomes ready when the process ends
    while True:
        now = time.monotonic()
        for trial in running.values():
            if now >= trial.call.deadline and not trial.timed_out:
                trial.timed_out = True
                trial.process.kill()
        open_deadlines = [trial.call.deadline for trial in running.values() if not trial.timed_out]
        pause_s = max(0.0, min(open_deadlines) - now) if open_deadlines else None
        for ready in wait([pipe, *running], pause_s):
            if isinstance(ready, Connection):
                trial = _fork(recipe, pipe.recv(), captures)
                running[trial.process.sentinel] = trial
            else:
                assert isinstance(ready, int)
                pipe.send(_end_of(running.pop(ready)))


def _fork(recipe: LoadedRecipe, call: TrialCall, captures: RankCaptures) -> _Running:
    for descriptor, file in enumerate(open_logs(call.log_folder), start=1):  # also of what a capture prints
        with file:
            os.dup2(file.fileno(), descriptor)
    with suppress(Exception):  # the trial meets the same error, and reports it in its measurement
        captures.of_plan(call.plan)
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(recipe, call, captures, os.getpid()), name=call.name
    )
    process.start()
    return _Running(call, process)


def _end_of(trial: _Running) -> TrialEnd:
    trial.process.join()
    code = trial.process.exitcode
    assert code is not None
    trial.process.close()
    problem = f"its process {how_it_ended(code)}" if code else ""
    return TrialEnd(trial.call.name, problem, trial.timed_out)


def _run(recipe: LoadedRecipe, call: TrialCall, captures: RankCaptures, parent: int) -> None:
    """The life of a trial's process: whatever the end of its ranks is, it writes a measurement."""
    die_with_parent(parent)
    show_devices(call.devices)
    measurement = measure(recipe, call.plan, call.measurement_file.parent, captures=captures)
    write_whole(call.measurement_file, measurement.to_json())
