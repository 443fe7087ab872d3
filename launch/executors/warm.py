"""The driver's end of the warm process, from which the trials of one driver on this machine are forked.

A warm process has imported torch and captured the model, so that a trial begins at once. It is a new interpreter, not
a fork of the driver, which has threads. The other end is ``launch.executors.fork_trials``; this file imports no torch.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

from auto3d.plan import Plan
from launch.recipe.load import LoadedRecipe
from launch.store.files import private_folder

KILLED_S = 10.0  # how long the kernel may take to end the processes of trials: it frees what memory they have
GRACE_S = 10.0  # how long the warm process may take to report a trial that it had to kill
LOGS = ("0_log.out", "0_log.err")  # standard output and standard error of a trial, in its log folder


@dataclass(frozen=True)
class TrialCall:
    """A trial that the warm process shall fork."""

    name: str
    plan: Plan
    measurement_file: Path
    log_folder: Path
    devices: tuple[str, ...]  # names of its GPUs, as CUDA_VISIBLE_DEVICES takes them; empty on CPUs
    deadline: float  # time.monotonic(), the same clock in all processes of a machine


@dataclass(frozen=True)
class TrialEnd:
    """How the process of a trial ended."""

    name: str
    problem: str = ""  # empty if it ended by itself with exit code 0
    timed_out: bool = False


class WarmProcess:
    """Starts trials of ``recipe``; the process itself starts with the first trial, and again if it dies.

    A context manager: at the end of the ``with`` the process and all trials that still run are killed.
    """

    def __init__(self, recipe: LoadedRecipe) -> None:
        self._recipe = recipe
        self._process: subprocess.Popen | None = None
        self._pipe: Connection | None = None
        self._running: dict[str, TrialCall] = {}

    def __enter__(self) -> "WarmProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, call: TrialCall) -> None:
        """Have ``call`` forked. What it prints goes to the files LOGS of its folder."""
        self._running[call.name] = call
        if self._pipe is None:
            self._start(call)
        assert self._pipe is not None
        with suppress(OSError):  # the process has died; ends() reports that
            self._pipe.send(call)

    def ends(self) -> list[TrialEnd]:
        """The trials that have ended since the last call."""
        ends: list[TrialEnd] = []
        try:
            while self._pipe is not None and self._pipe.poll():
                ends.append(self._pipe.recv())
        except (EOFError, OSError):
            code = self._end()
            ends += [TrialEnd(name, f"the process that forks trials {how_it_ended(code)}") for name in self._running]
        for end in ends:
            self._running.pop(end.name, None)
        overdue = [trial.name for trial in self._running.values() if time.monotonic() > trial.deadline + GRACE_S]
        if overdue:  # the warm process hangs, as in the user's code that it runs for a capture
            ends += [TrialEnd(name, "the process that forks trials hung", timed_out=True) for name in self._running]
            self.kill()
        return ends

    def kill(self) -> None:
        """Kill the process, and all trials and ranks with it: each dies with its parent, and has freed its memory."""
        if self._process is not None:
            self._process.kill()
            self._wait_for_trials()
            self._end()
        self._running.clear()

    def _wait_for_trials(self) -> None:
        """Wait until the pipe has no other end: trials and ranks inherit that, and the kernel closes it as they end."""
        assert self._pipe is not None
        deadline = time.monotonic() + KILLED_S
        with suppress(EOFError, OSError):
            while self._pipe.poll(max(0.0, deadline - time.monotonic())):
                self._pipe.recv_bytes()

    def _start(self, call: TrialCall) -> None:
        self._pipe, theirs = Pipe()
        number = theirs.fileno()
        command = [sys.executable, "-u", "-m", "launch.executors", str(number), str(os.getpid())]
        out, err = open_logs(call.log_folder)
        # It inherits this mask, and so do its trials: only the driver handles Ctrl-C, and then ends them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with theirs, out, err:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, pass_fds=[number]
                )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        with suppress(OSError):  # the process has died; ends() reports that
            self._pipe.send(self._recipe)

    def _end(self) -> int:
        """Wait for the process, which has ended or is about to; returns its exit code."""
        assert self._process is not None
        assert self._pipe is not None
        self._pipe.close()
        code = self._process.wait()
        self._process = self._pipe = None
        return code


def open_logs(folder: Path) -> tuple[BinaryIO, BinaryIO]:
    """The files LOGS in ``folder``, open to append to."""
    private_folder(folder)
    out, err = ((folder / name).open("ab", buffering=0) for name in LOGS)
    return out, err


def how_it_ended(exit_code: int) -> str:
    """In words; ``exit_code`` is negative for a signal, as subprocess and multiprocessing have it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    hint = ", as the kernel does when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-exit_code).name}{hint}"
