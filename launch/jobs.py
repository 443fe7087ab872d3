"""What SLURM knows of jobs: squeue of those that wait, run or ended just now; sacct of all, if there is accounting."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from launch.slurm_commands import SlurmError, run

DEFAULT_ARRAY = 1001  # SLURM's MaxArraySize where it is not set
ENDS = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")
ENDS += ("REVOKED", "TIMEOUT")


@dataclass(frozen=True)
class JobState:
    name: str  # SLURM's word, such as RUNNING
    reason: str = ""  # why it waits

    @property
    def why(self) -> str:
        """It waits, as far as SLURM knows yet."""
        return self.name if self.reason in ("", "None") else self.reason

    @property
    def ended(self) -> bool:
        return self.name in ENDS

    @property
    def running(self) -> bool:
        return self.name in ("RUNNING", "COMPLETING")

    @property
    def waits(self) -> bool:
        return not self.ended and not self.running


@dataclass(frozen=True)
class Queue:
    """Of this user's jobs, by their ids, as 123 or 123_4."""

    states: Mapping[str, JobState]
    names: Mapping[str, str]


def job_states(jobs: Collection[str]) -> dict[str, JobState]:
    """The states of those of ``jobs`` that SLURM knows; raises SlurmError if nobody answers.

    A job that accounting believes alive, but the queue does not hold, is not known: the cluster lost it.
    """
    if not jobs:
        return {}
    queue, account = _queue(), {}
    left = [job for job in jobs if queue is None or job not in queue.states]
    if left:
        account = _account(left)
        if account is None and queue is None:
            raise SlurmError("neither squeue nor sacct answers")
    states = {}
    for job in jobs:
        if queue is not None and job in queue.states:
            states[job] = queue.states[job]
        elif account and job in account and (queue is None or account[job].ended):
            states[job] = account[job]
    return states


def jobs_called(name: str) -> list[str]:
    """The ids of this user's jobs of that name; raises SlurmError if nobody answers."""
    queue = _queue()
    # Without a start time sacct tells of today alone.
    command = ["sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID", "--starttime=now-30days"]
    listed = _printed([*command, f"--name={name}"])
    if queue is None and listed is None:
        raise SlurmError("neither squeue nor sacct answers")
    found = [] if queue is None else [job for job, called in queue.names.items() if called == name]
    return list(dict.fromkeys([*found, *(listed or "").split()]))


def cancel(jobs: Sequence[str]) -> None:
    """Ask SLURM to end ``jobs``; raises SlurmError if it does not take it."""
    run(["scancel", *jobs])


def max_array_size() -> int:
    """How many jobs an array may have: SLURM's MaxArraySize, or its default where no cluster answers."""
    for line in (_printed(["scontrol", "show", "config"]) or "").splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "MaxArraySize" and value.strip().isdecimal():
            return max(1, int(value))
    return DEFAULT_ARRAY


def partitions() -> dict[str, int]:
    """How many nodes each partition has, the default one first; raises SlurmError if sinfo does not answer."""
    rows = [line.split("|") for line in run(["sinfo", "--noheader", "--format=%P|%D"]).stdout.splitlines()]
    rows.sort(key=lambda row: not row[0].endswith("*"))
    return {name.rstrip("*"): int(nodes) for name, nodes in rows}


def why_no_accounting() -> str:
    """Empty if sacct answers."""
    try:
        run(["sacct", "--noheader", "--allocations", "--format=JobID", "--starttime=now-1hour"])
    except SlurmError as error:
        return str(error)
    return ""


def _queue() -> Queue | None:
    command = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%T|%j|%r"]
    listed = _printed(command)
    if listed is None:
        return None
    rows = [line.split("|", 3) for line in listed.splitlines() if line.count("|") >= 3]
    return Queue(
        {job: JobState(state, reason) for job, state, _, reason in rows}, {job: name for job, _, name, _ in rows}
    )


def _account(jobs: Collection[str]) -> dict[str, JobState] | None:
    from submitit.slurm.slurm import SlurmInfoWatcher  # slow to import, and mostly the queue knows

    whole = sorted({job.split("_")[0] for job in jobs})
    command = ["sacct", "--allocations", "--parsable2", "--format=JobID,State,NodeList", f"--jobs={','.join(whole)}"]
    listed = _printed(command)
    if listed is None:
        return None
    read = SlurmInfoWatcher().read_info(listed)
    return {job: JobState(row["State"].split()[0]) for job, row in read.items() if row.get("State")}


def _printed(command: Sequence[str]) -> str | None:
    """None if it does not answer."""
    try:
        return run(command).stdout
    except SlurmError:
        return None
