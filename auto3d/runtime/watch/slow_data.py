"""Say that stages wait for data: a rank that takes inputs from the data spends much of an iteration on it."""

from collections.abc import Sequence
from dataclasses import dataclass

SHARE = 0.1  # part of an iteration from which reading slows a training down
WINDOWS = 2  # windows in a row in which it must


@dataclass(frozen=True)
class SlowData:
    """The rank that waits longest for data."""

    rank: int
    host: str
    share: float  # part of the time of an iteration

    def __str__(self) -> str:
        return (
            f"stages wait for data: reading takes {100 * self.share:.0f} % of an iteration on rank {self.rank} on "
            f"{self.host}; prepare samples once, in files, instead of each time that they are read"
        )


class SlowReads:
    """Follows the windows of a training, and says whether stages wait for data. Equal on every rank."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._windows = 0  # windows in a row in which they did

    def after(self, read_s: Sequence[float], iteration_s: float) -> SlowData | None:
        """What holds after a window; ``read_s`` has each rank's seconds of reading in an iteration."""
        most = max(read_s)
        self._windows = self._windows + 1 if most > SHARE * iteration_s else 0
        if self._windows < WINDOWS:
            return None
        rank = read_s.index(most)
        return SlowData(rank, self._hosts[rank], most / iteration_s)
