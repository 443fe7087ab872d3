"""What code of the user's draws as it reads samples: it follows from numbers that all ranks know."""

import ctypes
import random
from _random import Random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from xxhash import xxh3_64_intdigest

_SPARE: list[np.random.MT19937] = []  # bit generators that nobody draws from; numpy.random.seed can seed this type
_PYTHONS: Any = random._inst  # the generator whose methods are the functions of the module
_SIZE = Random.__basicsize__ - object.__basicsize__
_MEMORY = (ctypes.c_char * _SIZE).from_address(id(_PYTHONS) + object.__basicsize__)
"""The state of Python's generator in CPython (RandomObject of Modules/_randommodule.c): the number of the next word,
and 624 words. To copy it takes 0.1 µs; random.getstate makes a Python number of each word, in 8 µs."""


def _is_in_memory() -> bool:
    """Whether the state of Python's generator is in _MEMORY, as it is in CPython."""
    number, *words = np.frombuffer(_MEMORY.raw, dtype=np.uint32, count=625).tolist()
    return (*words, number) == random.getstate()[1]


def _copied() -> tuple[bytes, float | None]:
    return _MEMORY.raw, _PYTHONS.gauss_next


def _put_back(state: tuple[bytes, float | None]) -> None:
    _MEMORY.raw, _PYTHONS.gauss_next = state


_of_python: Callable[[], tuple]
_set_python: Callable[[tuple], None]
_of_python, _set_python = (_copied, _put_back) if _is_in_memory() else (random.getstate, random.setstate)


@contextmanager
def drawing() -> Iterator[Callable[..., int]]:
    """Inside, code of the user's draws from the generators of torch's CPU, numpy and Python; then they are as before,
    but for the second of two normal numbers that numpy may have made.

    What it gives lets them begin anew at some whole numbers, and returns the seed that these make. torch.manual_seed
    would also seed the generators of GPUs, from which the stages draw.
    """
    of_python, of_torch = _of_python(), torch.default_generator.get_state()
    of_numpy, ours = mtrand.get_bit_generator(), _SPARE.pop() if _SPARE else np.random.MT19937(0)
    mtrand.set_bit_generator(ours)  # to copy the state of numpy's takes as long as to read a sample
    try:
        yield _begin
    finally:
        _set_python(of_python)
        mtrand.set_bit_generator(of_numpy)
        _SPARE.append(ours)
        torch.default_generator.set_state(of_torch)


def _begin(*seed: int) -> int:
    begin = xxh3_64_intdigest(repr(seed).encode()) % 2**32
    torch.default_generator.manual_seed(begin)
    Random.seed(_PYTHONS, begin)  # random.seed does the same with a whole number
    _PYTHONS.gauss_next = None
    np.random.seed(begin)
    return begin
