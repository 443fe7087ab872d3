"""The order in which samples are read: a permutation per epoch, which follows from the seed and the epoch alone.

A permutation is computed place by place (a Feistel network over a grid of about the data's size: Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002), so that it takes no memory, and no time at the beginning of an epoch.
"""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import isqrt

from auto3d.data.interface import DataError

LAST_BATCHES = ("drop", "pad")
_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class Order:
    """Which of ``samples`` stored samples each place of each global batch holds.

    ``last_batch`` says what becomes of the last batch of an epoch where it is not full: ``drop`` leaves its samples
    out of the epoch, ``pad`` fills it with samples that do not count. Raises DataError if no batch is full.
    """

    samples: int
    global_batch: int
    seed: int
    shuffle: bool = True
    last_batch: str = "drop"  # one of LAST_BATCHES

    def __post_init__(self) -> None:
        if self.samples < self.global_batch:
            raise DataError(
                f"the data has {self.samples} sample{'s' * (self.samples != 1)}, "
                f"less than one global batch of {self.global_batch}; "
                f"use a global batch of at most {self.samples}, or more data"
            )

    @property
    def batches(self) -> int:
        """Global batches per epoch."""
        return (self.samples if self.last_batch == "drop" else self.samples + self.global_batch - 1) // (
            self.global_batch
        )

    @property
    def left_over(self) -> int:
        """Samples of the last batch of an epoch, if that is not full; else 0."""
        return self.samples % self.global_batch

    def sample(self, number: int) -> int | None:
        """The stored sample that sample ``number`` of the training is; None where it fills the last batch."""
        epoch, place = divmod(number, self.batches * self.global_batch)
        if place >= self.samples:
            return None
        return _permuted(place, self.samples, f"{self.seed} {epoch}".encode()) if self.shuffle else place

    def describe(self) -> str:
        """One line for the log, which says what becomes of the last batch."""
        line = f"{self.samples:,} samples, {self.batches:,} iterations per epoch"
        if not self.left_over:
            return f"{line}, all of them full"
        if self.last_batch == "pad":
            fill = self.global_batch - self.left_over
            return f"{line}; the last has {self.left_over:,} of {self.global_batch:,} samples and is padded with {fill}"
        first = self.samples - self.left_over
        which = f"numbers {first:,} to {self.samples - 1:,}" if not self.shuffle else "others in each epoch"
        return f"{line}; the last batch is not full and is dropped: {self.left_over:,} samples per epoch, {which}"


def _permuted(place: int, size: int, key: bytes) -> int:
    """The number at ``place`` of a permutation of range(``size``) that follows from ``key``."""
    columns = isqrt(size - 1) + 1
    rows = -(-size // columns)
    while True:
        row, column = divmod(place, columns)
        for number in range(_ROUNDS):
            row = (row + _hash(column, 2 * number, key)) % rows
            column = (column + _hash(row, 2 * number + 1, key)) % columns
        place = row * columns + column
        if place < size:  # the grid has a few places more, from which the walk goes on
            return place


@lru_cache(1 << 14)  # the samples of an epoch have columns and rows in common
def _hash(value: int, number: int, key: bytes) -> int:
    content = value.to_bytes(8, "little") + number.to_bytes(1, "little")
    return int.from_bytes(blake2b(content, digest_size=8, key=key).digest(), "little")
