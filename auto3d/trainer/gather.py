"""The weights of a training's ranks as one whole again."""

from collections.abc import MutableMapping

import torch
import torch.distributed as dist

from auto3d.capture.shard import Shard
from auto3d.runtime.rank import Rank
from auto3d.runtime.waiting import waiting_for

PREFIX = "model."  # names of parameters and buffers begin with it in Rank.state()


def gather(rank: Rank, whole: MutableMapping[str, torch.Tensor], *, timeout_s: float) -> None:
    """Copy the parameters and buffers of all ranks into ``whole``, on every rank. All ranks must call it.

    What is not in ``whole`` yet is added to it. Tensors travel one by one, so that no more than one takes memory beside
    ``whole``. Those that no rank holds, such as parameters that the loss does not use, keep their values.
    """
    held = {name.removeprefix(PREFIX): part for name, part in rank.state().items() if name.startswith(PREFIX)}
    mine = {name: (part.shape, part.tensor.dtype, part.shard) for name, part in held.items()}
    of_ranks = [mine] * dist.get_world_size()
    with waiting_for("the names of all ranks' weights", timeout_s):
        dist.all_gather_object(of_ranks, mine)
    owners: dict[tuple[str, int], tuple[int, tuple[int, ...], torch.dtype, Shard | None]] = {}
    for number, names in enumerate(of_ranks):
        for name, (shape, dtype, shard) in names.items():
            owners.setdefault((name, 0 if shard is None else shard.shard), (number, shape, dtype, shard))
    for (name, _), (owner, shape, dtype, shard) in sorted(owners.items(), key=lambda each: each[0]):
        tensor = torch.empty(shape if shard is None else shard.shape(shape), dtype=dtype)
        if owner == dist.get_rank():
            tensor.copy_(held[name].tensor)
        with waiting_for(f"{name}, which rank {owner} sends", timeout_s):
            dist.broadcast(tensor, owner)
        if name not in whole:
            whole[name] = torch.empty(shape, dtype=dtype)
        if shard is None:
            whole[name].copy_(tensor)
        else:
            shard.put_back(tensor, whole[name])
