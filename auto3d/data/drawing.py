"""What code of the user's draws as it reads samples: it follows from numbers that all ranks know."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.random import mtrand
from xxhash import xxh3_64_intdigest

_OURS = np.random.MT19937(0)  # of the type that numpy.random.seed can seed


@contextmanager
def drawing() -> Iterator[Callable[..., int]]:
    """Inside, code of the user's draws from the generators of torch's CPU, numpy and Python; then they are as before.

    What it gives lets them begin anew at some whole numbers, and returns the seed that these make. torch.manual_seed
    would also seed those of GPUs, from which the stages draw.
    """
    of_python, of_torch = random.getstate(), torch.default_generator.get_state()
    of_numpy = mtrand.get_bit_generator()
    mtrand.set_bit_generator(_OURS)  # to copy the state of numpy's takes as long as to read a sample
    try:
        yield _begin
    finally:
        random.setstate(of_python)
        mtrand.set_bit_generator(of_numpy)
        torch.default_generator.set_state(of_torch)


def _begin(*seed: int) -> int:
    begin = xxh3_64_intdigest(repr(seed).encode()) % 2**32
    torch.default_generator.manual_seed(begin)
    random.seed(begin)
    np.random.seed(begin)
    return begin
