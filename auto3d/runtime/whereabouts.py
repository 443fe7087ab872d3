"""Where this process is in its training: it tells so when it fails, and who forked it reads so when it cannot.

A process is one rank, so it has one ``HERE``, as torch.distributed has one default group.
"""

import mmap
import socket
import struct
from dataclasses import dataclass
from time import monotonic

LINE_BYTES = 512
BEFORE = "before its first iteration"


@dataclass(frozen=True)
class Place:
    """What a rank does, ``since`` a time.monotonic(), which is one clock for all processes of a machine."""

    at: str  # the iteration and the operation
    waiting_for: str  # empty while it computes
    since: float


class Board:
    """A line per rank, in memory that this process shares with those forked from it: it outlives a killed writer."""

    def __init__(self, ranks: int) -> None:
        self._memory = mmap.mmap(-1, ranks * LINE_BYTES)
        for rank in range(ranks):
            self.write(rank, BEFORE, "")

    def write(self, rank: int, at: str, waiting_for: str) -> None:
        text = f"{at}\n{waiting_for}".encode()[: LINE_BYTES - 9]
        line = struct.pack("d", monotonic()) + text + b"\0"
        self._memory[rank * LINE_BYTES : rank * LINE_BYTES + len(line)] = line

    def read(self, rank: int) -> Place:
        since, text = struct.unpack_from(f"d{LINE_BYTES - 8}s", self._memory, rank * LINE_BYTES)
        at, _, waiting_for = text.partition(b"\0")[0].decode(errors="replace").partition("\n")
        return Place(at, waiting_for, since)


class Whereabouts:
    """The place of one rank, which it writes on a board if it was given one."""

    def __init__(self) -> None:
        self.rank = 0
        self.hosts: list[str] = []  # of all ranks, once they have met
        self._host = socket.gethostname()
        self._at = BEFORE
        self._board: Board | None = None

    def write_on(self, board: Board, rank: int) -> None:
        self._board, self.rank = board, rank

    def is_at(self, at: str) -> None:
        self._at = at
        self._write("")

    def waits_for(self, what: str) -> None:
        self._write(what)

    def computes(self) -> None:
        self._write("")

    def name(self, rank: int) -> str:
        """Of any rank, for a person."""
        return f"rank {rank} on {self.hosts[rank] if self.hosts else self._host}"

    def __str__(self) -> str:
        return f"{self.name(self.rank)}, {self._at},"

    def _write(self, waiting_for: str) -> None:
        if self._board is not None:
            self._board.write(self.rank, self._at, waiting_for)


HERE = Whereabouts()
