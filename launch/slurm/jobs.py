"""States of jobs: squeue lists pending, running and just ended jobs; sacct lists all, if accounting is set up."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from launch.slurm.client import SlurmError, run

STATES_S = 5.0  # shortest time between two polls of job states: each loads the controller that all users share
DEFAULT_ARRAY = 1001  # SLURM's default MaxArraySize
ENDS = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
)


@dataclass(frozen=True)
class JobState:
    """A job's state as SLURM reports it."""

    name: str  # SLURM's word, such as RUNNING
    reason: str = ""  # SLURM's reason why the job is pending

    @property
    def why(self) -> str:
        """Why the job is pending: SLURM's reason, or the state's name until SLURM gives a reason."""
        return self.name if self.reason in ("", "None") else self.reason

    @property
    def ended(self) -> bool:
        return self.name in ENDS

    @property
    def running(self) -> bool:
        return self.name in ("RUNNING", "COMPLETING")

    @property
    def pending(self) -> bool:
        return not self.ended and not self.running


@dataclass(frozen=True)
class ListedJob:
    """One of this user's jobs as squeue or sacct lists it."""

    name: str
    state: JobState


# Callers pass the names of jobs with their ids. A job that has the id but another name is a different job: of another
# cluster, or of this cluster after its controller lost its state and counted anew.


def job_states(jobs: Mapping[str, str]) -> dict[str, JobState]:
    """The states of those ``jobs`` (names by ids) that SLURM knows; raises SlurmError if SLURM does not answer.

    A job that accounting lists as alive but that is not in the queue counts as unknown: the cluster lost it.
    """
    if not jobs:
        return {}
    queue = _queue()
    ended: dict[str, ListedJob] = {}
    not_queued = [job for job in jobs if queue is None or job not in queue]
    if not_queued:
        account = _account(not_queued)
        if account is None and queue is None:
            raise SlurmError("neither squeue nor sacct answers")
        ended = {
            job: listed_job for job, listed_job in (account or {}).items() if queue is None or listed_job.state.ended
        }
    return _states(jobs, {**ended, **(queue or {})})


def listed_states(jobs: Mapping[str, str]) -> dict[str, JobState]:
    """The states of those ``jobs`` that squeue still lists; raises SlurmError if it does not answer."""
    if not jobs:
        return {}
    if (queue := _queue()) is None:
        raise SlurmError("squeue does not answer")
    return _states(jobs, queue)


def _states(jobs: Mapping[str, str], listed: Mapping[str, ListedJob]) -> dict[str, JobState]:
    return {job: listed[job].state for job, name in jobs.items() if job in listed and listed[job].name == name}


def jobs_called(name: str) -> list[str]:
    """The ids of this user's jobs called ``name``; raises SlurmError if SLURM does not answer."""
    queue = _queue()
    # Without a start time sacct lists only the jobs of today.
    command = ["sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID", "--starttime=now-30days"]
    listed = _printed([*command, f"--name={name}"])
    if queue is None and listed is None:
        raise SlurmError("neither squeue nor sacct answers")
    queued = [] if queue is None else [job for job, listed_job in queue.items() if listed_job.name == name]
    return list(dict.fromkeys([*queued, *(listed or "").split()]))


def answers() -> bool:
    """Whether squeue answers now."""
    return _queue() is not None


def any_job() -> bool:
    """Whether squeue lists a job of this user that has not ended, beside the job that this process may be in."""
    own = os.environ.get("SLURM_JOB_ID")
    return any(job.split("_")[0] != own and not listed_job.state.ended for job, listed_job in (_queue() or {}).items())


def cancel(jobs: Sequence[str]) -> None:
    """Ask SLURM to cancel ``jobs``; raises SlurmError if it refuses."""
    run(["scancel", *jobs])


def max_array_size() -> int:
    """The largest size of a job array: SLURM's MaxArraySize, or its default if no cluster answers."""
    for line in (_printed(["scontrol", "show", "config"]) or "").splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "MaxArraySize" and value.strip().isdecimal():
            return max(1, int(value))
    return DEFAULT_ARRAY


def partitions() -> dict[str, int]:
    """The number of nodes of each partition, the default one first; raises SlurmError if sinfo does not answer."""
    rows = [line.split("|") for line in run(["sinfo", "--all", "--noheader", "--format=%P|%D"]).stdout.splitlines()]
    rows.sort(key=lambda row: not row[0].endswith("*"))
    return {name.rstrip("*"): int(nodes) for name, nodes in rows}


def why_no_accounting() -> str:
    """Why accounting cannot be used; empty if sacct answers."""
    try:
        run(["sacct", "--noheader", "--allocations", "--format=JobID", "--starttime=now-1hour"])
    except SlurmError as error:
        return str(error)
    return ""


def _queue() -> dict[str, ListedJob] | None:
    command = ["squeue", "--all", "--noheader", "--array", "--states=all", "--format=%i|%T|%j|%r"]
    listed = _printed([*command, f"--user={os.getuid()}"])
    if listed is None:
        return None
    rows = [line.split("|", 3) for line in listed.splitlines() if line.count("|") >= 3]
    return {job: ListedJob(name, JobState(state, reason)) for job, state, name, reason in rows}


def _account(jobs: Collection[str]) -> dict[str, ListedJob] | None:
    from submitit.slurm.slurm import SlurmInfoWatcher  # this import is slow, and the queue mostly suffices

    whole = sorted({job.split("_")[0] for job in jobs})
    command = ["sacct", "--allocations", "--parsable2", "--format=JobID,State,NodeList,JobName"]
    listed = _printed([*command, f"--jobs={','.join(whole)}"])
    if listed is None:
        return None
    read = SlurmInfoWatcher().read_info(listed)
    return {
        job: ListedJob(row["JobName"], JobState(row["State"].split()[0]))
        for job, row in read.items()
        if row.get("State")
    }


def _printed(command: Sequence[str]) -> str | None:
    """What ``command`` prints, or None if it does not answer."""
    try:
        return run(command).stdout
    except SlurmError:
        return None
