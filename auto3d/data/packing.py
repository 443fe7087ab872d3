"""How tokens become samples: windows of joined tokens (packed), or one document each (padded)."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from auto3d.data.interface import DataError


class Packed:
    """Consecutive samples of each of several arrays of tokens, which are opened when they are first read.

    A sample is ``length`` tokens and, if ``shifted``, the one after them, which the next sample begins with. The tokens
    after the last whole sample of an array are not used.
    """

    def __init__(
        self, arrays: Sequence[Callable[[], np.ndarray]], sizes: Sequence[int], *, length: int, shifted: bool
    ) -> None:
        self._arrays, self._length, self._read = list(arrays), length, length + shifted
        self._opened: dict[int, np.ndarray] = {}
        self._ends = list(accumulate(max(size - shifted, 0) // length for size in sizes))
        self.samples = self._ends[-1]
        self.unused = sum(sizes) - self.samples * length  # tokens in no sample as an input
        if not self.samples:
            raise DataError(f"files: found {sum(sizes)} tokens; one sample needs {self._read} of one file")

    def tokens(self, sample: int) -> np.ndarray:
        number = bisect_right(self._ends, sample)
        if number not in self._opened:
            self._opened[number] = self._arrays[number]()
        start = (sample - (self._ends[number - 1] if number else 0)) * self._length
        return self._opened[number][start : start + self._read].astype(np.int64)


class Padded:
    """One document per sample. ``open_tokens`` and ``open_ends`` give all tokens, and the ends of documents."""

    def __init__(self, open_tokens: Callable[[], np.ndarray], open_ends: Callable[[], np.ndarray]) -> None:
        self._open = open_tokens, open_ends
        self._opened: tuple[np.ndarray, np.ndarray] | None = None

    def tokens(self, sample: int) -> np.ndarray:
        if self._opened is None:
            self._opened = self._open[0](), self._open[1]()
        values, ends = self._opened
        return values[ends[sample - 1] if sample else 0 : ends[sample]].astype(np.int64)
