"""Files of tokens, mapped to memory: Megatron-LM's .bin with its .idx, and one-dimensional .npy files.

The .idx (Megatron-LM, megatron/core/datasets/indexed_dataset.py) has, little-endian: the 9 bytes ``MMIDIDX\\0\\0``; a
version, 1 (uint64); a code of the tokens' type (uint8); the numbers of sequences and of documents' bounds (uint64
each); the length of each sequence (int32); the place of each sequence in the .bin, in bytes (int64); and the bounds of
documents, in sequences (int64). With several modes, a mode of each sequence (int8) follows.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from auto3d.data.interface import DataError
from auto3d.data.kept import Tick, identity_of, kept
from auto3d.data.keys import DataKeys
from auto3d.data.packing import Packed

SUFFIXES = (".npy", ".bin")
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = Struct("<9sQBQQ")
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating-point
_SCANNED = 1 << 22  # tokens that a scan reads at once


def open_source(settings: DataKeys) -> "TokenFiles":
    """The samples of token files, which are scanned once and then known by their size and time of modification."""
    names = files_with_indices(settings.files)
    identity = {"scan": 1, "files": identity_of(names)}
    scan = partial(_scan, settings.files)
    return TokenFiles(settings, kept(settings.cache, identity, scan, wait_s=settings.wait_s)[1])


def files_with_indices(files: Sequence[str]) -> list[str]:
    """The files, and the .idx of each .bin. Raises DataError for a file with another suffix."""
    for name in files:
        if Path(name).suffix not in SUFFIXES:
            raise DataError(f"files: found {name}; source tokens takes .npy, and .bin with an .idx beside it")
    return [*files, *(str(_index_of(name)) for name in files if Path(name).suffix == ".bin")]


class TokenFiles:
    """Samples of consecutive tokens."""

    pad = 0  # no sample needs it

    def __init__(self, settings: DataKeys, scan: Mapping[str, Any]) -> None:
        arrays = [partial(_mapped, name) for name in settings.files]
        length, shifted = settings.sequence_length, settings.shifted
        self._packed = Packed(arrays, scan["tokens"], length=length, shifted=shifted)
        self._largest, self._tokens = scan["largest"], sum(scan["tokens"])
        self.samples: int | None = self._packed.samples

    def tokens(self, sample: int, seed: int) -> np.ndarray:
        return self._packed.tokens(sample)

    def column(self, sample: int, name: str) -> np.ndarray:
        raise DataError(f"source tokens has no column {name}")

    def whole(self, sample: int) -> dict[str, np.ndarray]:
        return {}

    def largest(self, column: str | None) -> int | None:
        return int(self._largest)

    def describe(self) -> str:
        unused = f"; {self._packed.unused:,} at the ends of files are in no sample" if self._packed.unused else ""
        return f"{self._tokens:,} tokens{unused}"


def _scan(files: Sequence[str], folder: Path, tick: Tick) -> dict[str, Any]:
    """Check every file; returns the numbers of tokens and the largest token."""
    sizes, largest = [], 0
    for name in files:
        tokens = _mapped(name)
        for start in range(0, len(tokens), _SCANNED):
            part = tokens[start : start + _SCANNED]
            if (least := int(part.min())) < 0:
                place = start + int(part.argmin())
                raise DataError(f"files: {name}: token {place} is {least}; it takes tokens of at least 0")
            largest = max(largest, int(part.max()))
            tick()
        sizes.append(len(tokens))
    return {"tokens": sizes, "largest": largest}


def _mapped(name: str) -> np.ndarray:
    """The tokens of a file, mapped to memory: [tokens]."""
    return _npy(name) if Path(name).suffix == ".npy" else _megatron(name)


def _npy(name: str) -> np.ndarray:
    try:
        tokens: np.ndarray = np.load(name, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise DataError(f"files: {name}: not a readable .npy of integers: {reason}") from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        content = f"shape {list(tokens.shape)} of {tokens.dtype}" if isinstance(tokens, np.ndarray) else "no array"
        raise DataError(f"files: {name}: found {content}; it takes one dimension of integers")
    return tokens


def _index_of(name: str) -> Path:
    return Path(name).with_suffix(".idx")


def _megatron(name: str) -> np.ndarray:
    index = _index_of(name)
    try:
        content: np.ndarray = np.memmap(index, dtype=np.uint8, mode="r")
        size = Path(name).stat().st_size
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is empty"
        raise DataError(f"files: {getattr(error, 'filename', None) or index}: {reason}") from None
    if len(content) < _HEADER.size or content[: len(_MAGIC)].tobytes() != _MAGIC:
        raise DataError(f"files: {index}: not an index of Megatron-LM: it does not begin with MMIDIDX")
    _, version, code, sequences, bounds = _HEADER.unpack(content[: _HEADER.size].tobytes())
    if version != 1 or code not in _TYPES:
        raise DataError(f"files: {index}: found version {version} and type {code}; it takes version 1 and integers")
    dtype, least = np.dtype(_TYPES[code]), _HEADER.size + 12 * sequences + 8 * bounds
    if len(content) not in (least, least + sequences):
        problem = f"it has {len(content)} bytes, and {sequences} sequences with {bounds} bounds have {least}"
        raise DataError(f"files: {index}: damaged: {problem}")
    lengths = content[_HEADER.size :][: 4 * sequences].view("<i4").astype(np.int64)
    places = content[_HEADER.size + 4 * sequences :][: 8 * sequences].view("<i8")
    ends = lengths.cumsum() * dtype.itemsize
    if (lengths < 0).any() or not np.array_equal(places, ends - lengths * dtype.itemsize):
        raise DataError(f"files: {index}: its sequences do not follow one another in {name}")
    if size != (expected := int(ends[-1]) if sequences else 0) or not size:
        raise DataError(f"files: {name}: found {size} bytes; its index {index.name} describes {expected}")
    return np.memmap(name, dtype=dtype, mode="r")
