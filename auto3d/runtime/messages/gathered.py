"""Numbers of every rank, on every rank."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from auto3d.runtime.waiting import waiting_for


def of_all_ranks(
    values: Sequence[float] | Sequence[int],
    dtype: torch.dtype,
    *,
    what: str = "the times and the memory of all ranks",
) -> torch.Tensor:
    """The ``values`` of every rank, on every rank: [ranks, values]. ``what`` says what it waits for."""
    gathered = torch.zeros(dist.get_world_size(), len(values), dtype=dtype)
    gathered[dist.get_rank()] = torch.tensor(values, dtype=dtype)
    with waiting_for(what):
        dist.all_reduce(gathered)
    return gathered
