"""The generators of torch, numpy and Python: what a script draws without a seed is the same on all ranks."""

import json
import random

import numpy as np
import torch
import torch.distributed as dist

_KEY = "auto3d/random states"


def go_on_with_those_of_rank_0(store: dist.Store, rank: int) -> None:
    """Give all ranks the states that the generators of rank 0 have now; ``store`` is the store of all ranks.

    Ranks that were seeded alike keep what they have. Each process begins with other states if nothing was seeded.
    """
    if rank == 0:
        store.set(_KEY, json.dumps(_states()))
    else:
        _set(json.loads(store.get(_KEY)))


def _states() -> dict:
    of_numpy = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in of_numpy],
        "torch": torch.get_rng_state().tolist(),
    }


def _set(states: dict) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
