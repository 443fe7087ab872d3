"""Fingerprints of samples: numbers by which processes that read the same samples find out whether they did."""

from collections.abc import Mapping
from functools import lru_cache
from zlib import crc32

import numpy as np
from xxhash import xxh3_64_intdigest

BITS = 40  # A fingerprint is so short that sums over the ranks of a cluster stay whole numbers in float64.
MODULUS = 1 << BITS
_ODD = 0x9E3779B97F4A7C15  # 2**64 / golden ratio


def fingerprints(values: Mapping[str, np.ndarray]) -> np.ndarray:
    """A fingerprint of each of several samples: [samples], of BITS bits in uint64.

    ``values`` has arrays of any type, [samples, …] each. One changed bit, or another name, changes the number.
    """
    number = len(next(iter(values.values())))
    samples = ({name: value[sample] for name, value in values.items()} for sample in range(number))
    return np.array([fingerprint(sample) for sample in samples], dtype=np.uint64)


def fingerprint(sample: Mapping[str, np.ndarray]) -> int:
    """The fingerprint of a single sample."""
    digest = sum(xxh3_64_intdigest(np.ascontiguousarray(value).data, _seed(name)) for name, value in sample.items())
    return digest % (1 << 64) >> (64 - BITS)


@lru_cache(1024)
def _seed(name: str) -> int:
    return crc32(name.encode())


def total(numbers: np.ndarray, first: int) -> int:
    """A number, of BITS bits, of the fingerprints ``numbers`` of samples, which have the places from ``first`` on."""
    return int(numbers @ _odd(first, first + len(numbers))) % MODULUS


@lru_cache(1024)  # the places of the micro-batches of a global batch, the same in every iteration
def _odd(first: int, stop: int) -> np.ndarray:
    """An odd factor for each place from ``first`` on: a multiple by an odd number loses no bit."""
    return _mixed(np.arange(first, stop, dtype=np.uint64)) | np.uint64(1)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """A permutation of uint64 that spreads each bit (the last steps of splitmix64: Steele et al., 2014)."""
    numbers = numbers + np.uint64(_ODD)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
