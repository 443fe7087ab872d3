"""What each rank is doing, so that an error can say so.

A failing rank reports its phase and what it is waiting for. If it dies silently, its parent process reads them from
memory that the two share. A process is one rank, so it has one ``THIS_RANK``, just as torch.distributed has one default
group.
"""

import mmap
import socket
import struct
from dataclasses import dataclass
from time import monotonic

LINE_BYTES = 512
_LINE = struct.Struct(f"d{LINE_BYTES - 8}s")  # seconds, and text that is cut, or filled with zeros
BEFORE_TRAINING = "before its first iteration"


@dataclass(frozen=True)
class Activity:
    """What a rank is doing. ``since`` is a time.monotonic(), a clock that all processes of a machine have in common."""

    phase: str  # the iteration and the operation
    waiting_for: str  # empty while the rank computes
    since: float


class ActivityBoard:
    """One line per rank, in memory shared with the forked ranks: a line can still be read after its rank was killed."""

    def __init__(self, ranks: int) -> None:
        self._memory = mmap.mmap(-1, ranks * LINE_BYTES)
        for rank in range(ranks):
            self.write(rank, BEFORE_TRAINING, "")

    def write(self, rank: int, phase: str, waiting_for: str) -> None:
        # A copy of the whole line: pack_into would first fill it with zeros, which the parent may read.
        line = _LINE.pack(monotonic(), f"{phase}\n{waiting_for}".encode())
        self._memory[rank * LINE_BYTES : (rank + 1) * LINE_BYTES] = line

    def read(self, rank: int) -> Activity:
        since, text = _LINE.unpack_from(self._memory, rank * LINE_BYTES)
        phase, _, waiting_for = text.partition(b"\0")[0].decode(errors="replace").partition("\n")
        return Activity(phase, waiting_for, since)


class RankActivity:
    """The present activity of one rank, and how long it waits; ``str`` of it names the rank, its host and its phase."""

    def __init__(self) -> None:
        self.rank = 0
        self.hosts: list[str] = []  # host names by rank, once the ranks have joined
        self.timeout_s = 300.0  # time-out of each wait for another rank; joining the ranks sets it
        self._host = socket.gethostname()
        self._phase = BEFORE_TRAINING
        self._board: ActivityBoard | None = None

    def report_to(self, board: ActivityBoard, rank: int) -> None:
        """From now on write every change to line ``rank`` of ``board``.

        The process has just been forked, so its training begins, whatever its parent has trained itself.
        """
        self._board, self.rank, self._phase = board, rank, BEFORE_TRAINING

    def set_phase(self, phase: str) -> None:
        """Enter ``phase``, computing."""
        self._phase = phase
        if self._board is not None:
            self._board.write(self.rank, phase, "")

    def set_waiting_for(self, what: str) -> None:
        if self._board is not None:
            self._board.write(self.rank, self._phase, what)

    def set_computing(self) -> None:
        if self._board is not None:
            self._board.write(self.rank, self._phase, "")

    def name(self, rank: int) -> str:
        """``rank``, which may be another rank, and its host, for use in messages."""
        return f"rank {rank} on {self.hosts[rank] if self.hosts else self._host}"

    def __str__(self) -> str:
        return f"{self.name(self.rank)}, {self._phase},"


THIS_RANK = RankActivity()
