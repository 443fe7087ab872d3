"""The weights of a training's ranks as one whole module again."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from auto3d.capture.shard import Shard
from auto3d.plan import Plan
from auto3d.runtime.rank import Rank
from auto3d.runtime.waiting import waiting_for


def gather(rank: Rank, plan: Plan, whole: Mapping[str, torch.Tensor], *, timeout_s: float) -> None:
    """Copy the parameters and buffers of all ranks into ``whole``, on every rank. All ranks must call it.

    Tensors travel one by one, so that no more than one takes memory beside ``whole``. Those that no rank holds, such as
    parameters that the loss does not use, keep their values.
    """
    held = rank.parameters | rank.buffers
    split = rank.sharding.split
    shard_here = plan.position(dist.get_rank())[3]
    mine = {name: shard_here if name in split else 0 for name in held}
    of_ranks: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    with waiting_for("the names of all ranks' weights", timeout_s):
        dist.all_gather_object(of_ranks, mine)
    owners: dict[tuple[str, int], int] = {}
    for number, names in enumerate(of_ranks):
        for part in names.items():
            owners.setdefault(part, number)
    for (name, number), owner in sorted(owners.items()):
        target = whole[name]
        shard = Shard(split[name], number, plan.tp) if name in split else None
        tensor = torch.empty(tuple(target.shape if shard is None else shard.shape(target.shape)), dtype=target.dtype)
        if owner == dist.get_rank():
            tensor.copy_(held[name].detach())
        with waiting_for(f"{name}, which rank {owner} sends", timeout_s):
            dist.broadcast(tensor, owner)
        if shard is None:
            target.copy_(tensor)
        else:
            shard.put_back(tensor, target)
