"""What SLURM knows of jobs: squeue of those that wait, run or ended just now; sacct of all, if there is accounting."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from launch.slurm.client import SlurmError, run

STATES_S = 5.0  # at least, between two looks at the states of jobs: they load the controller that all users share
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
class Listed:
    """One of this user's jobs as SLURM lists it."""

    name: str
    state: JobState


# Jobs are given with their names, by which jobs of another cluster, or of one whose controller forgot some of them, are
# told from those that have their numbers now.


def job_states(jobs: Mapping[str, str]) -> dict[str, JobState]:
    """The states of those of ``jobs``, names by ids, that SLURM knows; raises SlurmError if nobody answers.

    A job that accounting believes alive, but the queue does not hold, is not known: the cluster lost it.
    """
    if not jobs:
        return {}
    queue, account = _queue(), {}
    left = [job for job in jobs if queue is None or job not in queue]
    if left:
        account = _account(left)
        if account is None and queue is None:
            raise SlurmError("neither squeue nor sacct answers")
        account = {job: one for job, one in (account or {}).items() if queue is None or one.state.ended}
    return _states(jobs, {**account, **(queue or {})})


def listed_states(jobs: Mapping[str, str]) -> dict[str, JobState]:
    """The states of those of ``jobs`` that squeue still lists; raises SlurmError if it does not answer."""
    if not jobs:
        return {}
    if (queue := _queue()) is None:
        raise SlurmError("squeue does not answer")
    return _states(jobs, queue)


def _states(jobs: Mapping[str, str], listed: Mapping[str, Listed]) -> dict[str, JobState]:
    return {job: listed[job].state for job, name in jobs.items() if job in listed and listed[job].name == name}


def jobs_called(name: str) -> list[str]:
    """The ids of this user's jobs of that name; raises SlurmError if nobody answers."""
    queue = _queue()
    # Without a start time sacct tells of today alone.
    command = ["sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID", "--starttime=now-30days"]
    listed = _printed([*command, f"--name={name}"])
    if queue is None and listed is None:
        raise SlurmError("neither squeue nor sacct answers")
    found = [] if queue is None else [job for job, one in queue.items() if one.name == name]
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
    rows = [line.split("|") for line in run(["sinfo", "--all", "--noheader", "--format=%P|%D"]).stdout.splitlines()]
    rows.sort(key=lambda row: not row[0].endswith("*"))
    return {name.rstrip("*"): int(nodes) for name, nodes in rows}


def why_no_accounting() -> str:
    """Empty if sacct answers."""
    try:
        run(["sacct", "--noheader", "--allocations", "--format=JobID", "--starttime=now-1hour"])
    except SlurmError as error:
        return str(error)
    return ""


def _queue() -> dict[str, Listed] | None:
    command = ["squeue", "--all", "--noheader", "--array", "--states=all", "--format=%i|%T|%j|%r"]
    listed = _printed([*command, f"--user={os.getuid()}"])
    if listed is None:
        return None
    rows = [line.split("|", 3) for line in listed.splitlines() if line.count("|") >= 3]
    return {job: Listed(name, JobState(state, reason)) for job, state, name, reason in rows}


def _account(jobs: Collection[str]) -> dict[str, Listed] | None:
    from submitit.slurm.slurm import SlurmInfoWatcher  # slow to import, and mostly the queue knows

    whole = sorted({job.split("_")[0] for job in jobs})
    command = ["sacct", "--allocations", "--parsable2", "--format=JobID,State,NodeList,JobName"]
    listed = _printed([*command, f"--jobs={','.join(whole)}"])
    if listed is None:
        return None
    read = SlurmInfoWatcher().read_info(listed)
    return {
        job: Listed(row["JobName"], JobState(row["State"].split()[0])) for job, row in read.items() if row.get("State")
    }


def _printed(command: Sequence[str]) -> str | None:
    """None if it does not answer."""
    try:
        return run(command).stdout
    except SlurmError:
        return None
