"""SLURM's signals to a process in one of its jobs: save and end soon, or end now."""

import mmap
import os
import signal
import sys
import time
from dataclasses import dataclass

from auto3d.errors import InputError
from launch.slurm.client import SlurmError, run

ENDING_S = 600.0  # longer than SLURM's GraceTime and KillWait together, which are minutes
POLL_S = 0.1
WARNING = signal.SIGURG  # its default action is to do nothing, so it harms no process without a handler


class EndingError(InputError):
    """SLURM asked a job to end but did not end it."""


class Flag:
    """A flag that is set once; processes that are forked from this process see it, too."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    def set(self) -> None:
        self._memory[0] = 1

    def __bool__(self) -> bool:
        return self._memory[0] == 1


@dataclass(frozen=True)
class Asked:
    """Requests that this process has received from SLURM."""

    to_save: Flag  # a warning some time before the job's time limit or, on many clusters, before preemption
    to_end: Flag  # SLURM kills the job a few seconds later, whatever we do

    def __bool__(self) -> bool:
        return bool(self.to_save) or bool(self.to_end)

    def within(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a request; returns whether it has come."""
        deadline = time.monotonic() + seconds
        while not self and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return bool(self)


def asked_by_slurm() -> Asked:
    """Record from now on what SLURM asks of this process; SIGTERM no longer ends it."""
    asked = Asked(Flag(), Flag())
    signal.signal(WARNING, lambda number, frame: asked.to_save.set())
    signal.signal(signal.SIGTERM, lambda number, frame: asked.to_end.set())
    return asked


def await_end(asked: Asked, *, requeue: bool) -> None:
    """Wait for SLURM to end this process; raises EndingError after ENDING_S.

    As long as a job does not end by itself first, SLURM's state says why it ended, and SLURM requeues it if it was
    preempted. A job that was warned of its time limit must ask to be requeued; ``requeue`` makes this call do so.
    """
    deadline = time.monotonic() + ENDING_S
    requeued = False
    while time.monotonic() < deadline:
        if requeue and asked.to_save and not requeued:
            requeued = True
            _requeue(os.environ["SLURM_JOB_ID"])
        time.sleep(POLL_S)
    raise EndingError(f"SLURM asked the job to end but did not end it within {ENDING_S:g} s")


def _requeue(job: str) -> None:
    try:
        run(["scontrol", "requeue", job])
        result = "it is requeued, and will continue from its checkpoint"
    except SlurmError as error:
        result = f"it cannot be requeued: {error}"
    print(f"job {job} was warned of its end; {result}", file=sys.stderr, flush=True)
