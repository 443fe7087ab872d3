"""What SLURM asks of a process that runs in one of its jobs: to save and end soon, or to end."""

import mmap
import os
import signal
import sys
import time
from dataclasses import dataclass

from auto3d.errors import InputError
from launch.slurm.client import SlurmError, run

ENDING_S = 600.0  # SLURM's GraceTime and KillWait together are minutes at most
POLL_S = 0.1
WARNING = signal.SIGURG  # it does no harm to a process that does not wait for it


class EndingError(InputError):
    """SLURM asked a job to end, and did not end it."""


class Flag:
    """Something that is so from some moment on, also for the processes that are forked from this one."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    def set(self) -> None:
        self._memory[0] = 1

    def __bool__(self) -> bool:
        return self._memory[0] == 1


@dataclass(frozen=True)
class Asked:
    """What SLURM has asked."""

    to_save: Flag  # its warning, some time before the job's limit or, on many clusters, before it is preempted
    to_end: Flag  # it ends the job a few seconds later, whatever we do

    def __bool__(self) -> bool:
        return bool(self.to_save) or bool(self.to_end)

    def within(self, seconds: float) -> bool:
        """Whether it asks by then."""
        deadline = time.monotonic() + seconds
        while not self and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return bool(self)


def asked_by_slurm() -> Asked:
    """Note from now on what SLURM asks of this process; SIGTERM no longer ends it."""
    asked = Asked(Flag(), Flag())
    signal.signal(WARNING, lambda number, frame: asked.to_save.set())
    signal.signal(signal.SIGTERM, lambda number, frame: asked.to_end.set())
    return asked


def await_end(asked: Asked, *, requeue: bool) -> None:
    """Wait for SLURM to end this process; raises EndingError after ENDING_S.

    SLURM's state tells why a job ended, and starts a preempted one again, as long as the job does not end by itself
    first. One that was warned because its time is over has to ask for another start: this does, if told to ``requeue``.
    """
    deadline = time.monotonic() + ENDING_S
    asked_for_start = False
    while time.monotonic() < deadline:
        if requeue and asked.to_save and not asked_for_start:
            asked_for_start = True
            _requeue(os.environ["SLURM_JOB_ID"])
        time.sleep(POLL_S)
    raise EndingError(f"SLURM asked the job to end, and did not end it within {ENDING_S:g} s")


def _requeue(job: str) -> None:
    try:
        run(["scontrol", "requeue", job])
        told = "it is queued again, and goes on from the checkpoint"
    except SlurmError as error:
        told = f"it cannot be queued again: {error}"
    print(f"job {job} was warned of its end; {told}", file=sys.stderr, flush=True)
