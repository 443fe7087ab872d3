"""Random tokens."""

import numpy as np

from auto3d.data.interface import DataError
from auto3d.data.keys import DataKeys


def open_source(settings: DataKeys) -> "SyntheticTokens":
    return SyntheticTokens(settings)


class SyntheticTokens:
    """Tokens that are uniform in the vocabulary."""

    samples = None
    pad = 0

    def __init__(self, settings: DataKeys) -> None:
        self._length, self._size = settings.sequence_length + 1, settings.vocabulary_size

    def tokens(self, sample: int, seed: int) -> np.ndarray:
        return np.random.default_rng([seed, sample, 0]).integers(0, self._size, self._length, dtype=np.int64)

    def column(self, sample: int, name: str) -> np.ndarray:
        raise DataError(f"source synthetic has no column {name}")

    def whole(self, sample: int) -> dict[str, np.ndarray]:
        return {}

    def largest(self, column: str | None) -> int | None:
        return self._size - 1

    def describe(self) -> str:
        return ""
