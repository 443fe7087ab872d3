"""Waits that last longer than they may, found from outside the ranks.

A rank that waits inside a call without a time-out, such as the set-up of an NCCL communicator, cannot report it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic, sleep

from auto3d.runtime.measurement import Status
from auto3d.runtime.whereabouts import HERE, Board, Place
from launch.run.diagnosis import Ending, Failure

MARGIN_S = 5.0  # a rank that can report its own wait does so sooner, and knows more about it
CONFIRM_S = 0.1


@dataclass(frozen=True)
class WaitLimit:
    """How long one wait of a rank may last, by what ``board`` shows."""

    board: Board
    limit_s: float  # may be infinite

    def next_look(self, ranks: Iterable[int]) -> float:
        """The time.monotonic() before which no wait of ``ranks`` exceeds the limit."""
        begun = [place.since for place in map(self.board.read, ranks) if place.waiting_for]
        return min([monotonic(), *begun]) + self.limit_s

    def failures(self, ranks: Iterable[int]) -> dict[int, Failure]:
        """The failure of each of ``ranks`` whose wait exceeds the limit."""
        suspects = {rank: place for rank in ranks if self._exceeded(place := self.board.read(rank))}
        if suspects:
            sleep(CONFIRM_S)  # a rank may have been writing its line while it was read
        return {rank: _failure(rank, place) for rank, place in suspects.items() if self.board.read(rank) == place}

    def _exceeded(self, place: Place) -> bool:
        return bool(place.waiting_for) and monotonic() - place.since >= self.limit_s


def _failure(rank: int, place: Place) -> Failure:
    waited = f"waited {monotonic() - place.since:.0f} s for {place.waiting_for}"
    return Failure(Ending.WAITED, Status.TIMEOUT, f"{HERE.name(rank)}, {place.at}, {waited}")
