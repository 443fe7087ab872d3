"""Overlong waits, detected from outside the ranks.

A rank that waits inside a call without a time-out, such as the set-up of an NCCL communicator, cannot report it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic, sleep

from auto3d.runtime.activity import THIS_RANK, Activity, ActivityBoard
from auto3d.runtime.measurement import Status
from launch.run.diagnosis import Ending, Failure

MARGIN_S = 5.0  # time in which a rank that can report its own overlong wait does so, with more detail
CONFIRM_S = 0.1  # pause before an overlong wait is read a second time


@dataclass(frozen=True)
class WaitLimit:
    """Limit of a single wait of any rank; ``board`` shows what each rank waits for and since when."""

    board: ActivityBoard
    limit_s: float  # seconds; may be infinite

    def next_look(self, ranks: Iterable[int]) -> float:
        """The earliest time (time.monotonic) at which a wait of ``ranks`` can exceed the limit."""
        begun = [activity.since for activity in map(self.board.read, ranks) if activity.waiting_for]
        return min([monotonic(), *begun]) + self.limit_s

    def failures(self, ranks: Iterable[int]) -> dict[int, Failure]:
        """The failures of those ``ranks`` whose waits exceed the limit."""
        suspects = {rank: activity for rank in ranks if self._exceeded(activity := self.board.read(rank))}
        if suspects:
            sleep(CONFIRM_S)  # a rank may have been writing its line while it was read
        return {
            rank: _failure(rank, activity) for rank, activity in suspects.items() if self.board.read(rank) == activity
        }

    def _exceeded(self, activity: Activity) -> bool:
        return bool(activity.waiting_for) and monotonic() - activity.since >= self.limit_s


def _failure(rank: int, activity: Activity) -> Failure:
    waited = f"waited {monotonic() - activity.since:.0f} s for {activity.waiting_for}"
    return Failure(Ending.WAITED, Status.TIMEOUT, f"{THIS_RANK.name(rank)}, {activity.phase}, {waited}")
