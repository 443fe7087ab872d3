"""ZeRO-1: ranks that hold the same parameters update one shard of them each and send it to the others.

After ZeRO (SC 2020, section 5.1), but with whole parameters per rank, and with gradients that all ranks have summed.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.waiting import wait, waiting_for

BUCKET_BYTES = 16 * 2**20  # size of the parameters in one broadcast: enough to saturate a link
_WHAT = "the weights that other ranks update"


def connect_shards(group: dist.ProcessGroup, device: torch.device, *, timeout_s: float) -> None:
    """Use ``group`` once as updates will use it: NCCL connects at first use, which must not be between messages."""
    for rank in dist.get_process_group_ranks(group):
        what = f"a connection for {_WHAT}"
        with waiting_for(what, timeout_s):
            work = dist.broadcast(torch.zeros(1, device=device), rank, group=group, async_op=True)
        assert work is not None  # because it is asynchronous
        wait(work, timeout_s=timeout_s, what=what)


class ShardedOptimizer:
    """The optimizer of ``parameters`` on one rank of ``group``; all its ranks list the parameters in the same order.

    ``make`` makes an optimizer for a list of parameter groups: ``self.shard`` is the one for this rank's shard, which
    may be empty.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        make: Callable[[list[dict[str, list[nn.Parameter]]]], torch.optim.Optimizer],
        group: dist.ProcessGroup,
    ) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        shards = split_evenly(parameters, len(self._ranks))
        self._buckets = [list(buckets(shard)) for shard in shards]
        self.shard = make([{"params": shards[dist.get_rank(group)]}])

    def step(self, *, run_ahead: RunAhead, timeout_s: float) -> None:
        """Update this rank's shard, broadcast it, and receive the shards of the others."""
        self.shard.step()
        for rank, buckets_of_rank in zip(self._ranks, self._buckets, strict=True):
            for bucket in buckets_of_rank:
                self._broadcast(bucket, rank, run_ahead, timeout_s)

    @torch.no_grad()
    def _broadcast(self, bucket: Sequence[nn.Parameter], rank: int, run_ahead: RunAhead, timeout_s: float) -> None:
        """Send the parameters of ``bucket`` from ``rank`` to all of the group."""
        together = len(bucket) > 1 or not bucket[0].is_contiguous()
        flat = torch.cat([parameter.flatten() for parameter in bucket]) if together else bucket[0].data
        with waiting_for(_WHAT, timeout_s):
            work = dist.broadcast(flat, rank, group=self._group, async_op=True)
        assert work is not None  # because it is asynchronous
        run_ahead.wait(work, _WHAT)
        if together and rank != dist.get_rank():
            pieces = flat.split([parameter.numel() for parameter in bucket])
            for parameter, piece in zip(bucket, pieces, strict=True):
                parameter.data.copy_(piece.view(parameter.shape))


def split_evenly(parameters: Sequence[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
    """The shard of each of ``ranks`` ranks: whole parameters, about equally many elements in each shard."""
    shards: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for parameter in sorted(parameters, key=torch.numel, reverse=True):
        smallest = sizes.index(min(sizes))
        shards[smallest].append(parameter)
        sizes[smallest] += parameter.numel()
    return shards


def buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """``parameters`` in order, in buckets for one broadcast each: one type, at most BUCKET_BYTES or 1 parameter."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        size += parameter.nbytes
        if bucket and (size > BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], parameter.nbytes
        bucket.append(parameter)
    if bucket:
        yield bucket
