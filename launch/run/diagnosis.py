"""What to tell when ranks fail: first of the one to blame, then what others waited for in vain."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from time import monotonic

from auto3d.runtime.measurement import Status
from auto3d.runtime.whereabouts import HERE, Board, Place

MOST_WAITS = 6  # that are told of


class Ending(Enum):
    """The likelier cause first."""

    REFUSED = auto()  # by an InputError: the message says all
    STOPPED = auto()
    DIED = auto()  # without a word
    RAISED = auto()  # any other error
    ABORTED = auto()  # by SIGABRT, which may be NCCL's answer to the failure of another rank
    SILENT = auto()  # it neither failed nor waited
    WAITED = auto()  # in vain for another rank, whose end or silence is the cause


@dataclass(frozen=True)
class Failure:
    """How one rank failed, as it told or as its process ended."""

    ending: Ending
    status: Status
    error: str


@dataclass(frozen=True)
class Snapshot:
    """What each rank did at one moment."""

    places: Mapping[int, Place]  # by rank
    stopped: Mapping[int, bool]
    taken: float  # time.monotonic()


def look(board: Board, processes: Mapping[int, int]) -> Snapshot:
    """``processes`` are the ids of the ranks' processes."""
    places = {rank: board.read(rank) for rank in processes}
    return Snapshot(places, {rank: _is_stopped(process) for rank, process in processes.items()}, monotonic())


def death(rank: int, place: Place, exitcode: int) -> Failure:
    """The failure of a rank that ended without a report; ``place`` is where it was."""
    if exitcode == -signal.SIGABRT:
        # The watchdog of an NCCL process group aborts its process when a message is late or another rank is gone.
        ending = (Ending.WAITED, Status.TIMEOUT) if place.waiting_for else (Ending.ABORTED, Status.FAILED)
        return Failure(*ending, told(rank, place, "was ended by SIGABRT (its own output says why)"))
    how = f"ended with exit code {exitcode} and no result"
    if exitcode < 0:
        hint = ", as the kernel does when memory runs out" if exitcode == -signal.SIGKILL else ""
        how = f"was killed by {signal.Signals(-exitcode).name}{hint}"
    return Failure(Ending.DIED, Status.FAILED, told(rank, place, how))


def diagnose(failures: Mapping[int, Failure], first: Snapshot) -> Failure:
    """The likeliest cause; ``first`` was seen when the first of ``failures`` was known."""
    suspects = list(failures.values())
    for rank, place in first.places.items():
        if first.stopped[rank]:
            how = "is stopped, as by SIGSTOP or a debugger"
            suspects.append(Failure(Ending.STOPPED, Status.TIMEOUT, told(rank, place, how)))
    silent = [rank for rank, place in first.places.items() if rank not in failures and not place.waiting_for]
    for rank in sorted(silent, key=lambda rank: first.places[rank].since):
        how = f"was not done after {first.taken - first.places[rank].since:.1f} s"
        suspects.append(Failure(Ending.SILENT, Status.TIMEOUT, told(rank, first.places[rank], how)))
    cause, *others = sorted(suspects, key=likelihood)
    if cause.ending in (Ending.REFUSED, Ending.RAISED):
        return cause
    waits = [one.error for one in others if one.ending is Ending.WAITED]
    return replace(cause, error="\n".join([cause.error, *waits[:MOST_WAITS]]))


def likelihood(failure: Failure) -> tuple[bool, int]:
    """Sorts failures, the likeliest cause of the others first."""
    return failure.status is not Status.OOM, failure.ending.value


def told(rank: int, place: Place, how: str) -> str:
    waiting = f"; it was waiting for {place.waiting_for}" if place.waiting_for else ""
    return f"{HERE.name(rank)}, {place.at}, {how}{waiting}"


def _is_stopped(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"  # proc(5): after the name, which may hold anything
