"""The error message of a failed run: first the rank that caused the failure, then what other ranks waited for."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from time import monotonic

from auto3d.runtime.activity import THIS_RANK, Activity, ActivityBoard
from auto3d.runtime.measurement import Status

MOST_WAITS = 6  # waits named in one message


class Ending(Enum):
    """How a rank ended, the likeliest cause of a failure first."""

    REFUSED = auto()  # raised an InputError, whose message is complete
    STOPPED = auto()  # stopped by a signal or a debugger
    DIED = auto()  # ended without a report
    RAISED = auto()  # raised any other error
    ABORTED = auto()  # ended by SIGABRT, perhaps NCCL's reaction to the failure of another rank
    SILENT = auto()  # neither failed nor waited for another rank
    WAITED = auto()  # waited in vain for another rank, which is the cause


@dataclass(frozen=True)
class Failure:
    """How one rank failed, by its own report or by the end of its process."""

    ending: Ending
    status: Status
    error: str


@dataclass(frozen=True)
class RanksSnapshot:
    """The activity of each rank at one moment."""

    activities: Mapping[int, Activity]  # by rank
    stopped: Mapping[int, bool]  # by rank
    taken: float  # time.monotonic()


def look(board: ActivityBoard, processes: Mapping[int, int]) -> RanksSnapshot:
    """The activities of the ranks now; ``processes`` maps ranks to process ids."""
    activities = {rank: board.read(rank) for rank in processes}
    return RanksSnapshot(activities, {rank: _is_stopped(process) for rank, process in processes.items()}, monotonic())


def death(rank: int, activity: Activity, exitcode: int) -> Failure:
    """The failure of a rank that ended without a report; ``activity`` is its last activity."""
    if exitcode == -signal.SIGABRT:
        # The watchdog of an NCCL process group aborts its process when a message is late or another rank is gone.
        ending = (Ending.WAITED, Status.TIMEOUT) if activity.waiting_for else (Ending.ABORTED, Status.FAILED)
        return Failure(*ending, activity_text(rank, activity, "was ended by SIGABRT (its own output says why)"))
    how = f"ended with exit code {exitcode} and no result"
    if exitcode < 0:
        hint = ", as the kernel does when memory runs out" if exitcode == -signal.SIGKILL else ""
        how = f"was killed by {signal.Signals(-exitcode).name}{hint}"
    return Failure(Ending.DIED, Status.FAILED, activity_text(rank, activity, how))


def diagnose(failures: Mapping[int, Failure], first: RanksSnapshot) -> Failure:
    """The likeliest cause of ``failures``; ``first`` is the snapshot taken at the first of them."""
    suspects = list(failures.values())
    for rank, activity in first.activities.items():
        if first.stopped[rank]:
            how = "is stopped, as by SIGSTOP or a debugger"
            suspects.append(Failure(Ending.STOPPED, Status.TIMEOUT, activity_text(rank, activity, how)))
    silent = [rank for rank, activity in first.activities.items() if rank not in failures and not activity.waiting_for]
    for rank in sorted(silent, key=lambda rank: first.activities[rank].since):
        how = f"was not done after {first.taken - first.activities[rank].since:.1f} s"
        suspects.append(Failure(Ending.SILENT, Status.TIMEOUT, activity_text(rank, first.activities[rank], how)))
    cause, *others = sorted(suspects, key=likelihood)
    if cause.ending in (Ending.REFUSED, Ending.RAISED):
        return cause
    waits = [other.error for other in others if other.ending is Ending.WAITED]
    return replace(cause, error="\n".join([cause.error, *waits[:MOST_WAITS]]))


def likelihood(failure: Failure) -> tuple[bool, int]:
    """Sort key of failures: the likeliest cause of the others comes first."""
    return failure.status is not Status.OOM, failure.ending.value


def activity_text(rank: int, activity: Activity, how: str) -> str:
    """One line: the rank, its phase, how it ended, and what it was waiting for."""
    waiting = f"; it was waiting for {activity.waiting_for}" if activity.waiting_for else ""
    return f"{THIS_RANK.name(rank)}, {activity.phase}, {how}{waiting}"


def _is_stopped(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"  # proc(5): the state follows the name in parentheses
