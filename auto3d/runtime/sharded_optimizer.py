"""ZeRO-1: ranks that hold the same parameters update a share of them each, and send it to the others.

After ZeRO (SC 2020, section 5.1), but for whole parameters, and gradients that all ranks have summed.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.waiting import wait, waiting_for

BUCKET_BYTES = 16 * 2**20  # parameters sent in one broadcast: enough to fill a link
_WHAT = "the weights that other ranks update"


def connect_shares(group: dist.ProcessGroup, device: torch.device, *, timeout_s: float) -> None:
    """Use ``group`` as updates will: NCCL connects at its first use, which must not be between messages."""
    for rank in dist.get_process_group_ranks(group):
        what = f"a connection for {_WHAT}"
        with waiting_for(what, timeout_s):
            work = dist.broadcast(torch.zeros(1, device=device), rank, group=group, async_op=True)
        wait(work, timeout_s=timeout_s, what=what)


class ShardedOptimizer:
    """The optimizer of ``parameters`` on a rank of ``group``, all of which give them in the same order.

    ``make`` makes an optimizer of groups of parameters: here of this rank's ``share``, which may be empty.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        make: Callable[[list[dict[str, list[nn.Parameter]]]], torch.optim.Optimizer],
        group: dist.ProcessGroup,
    ) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        shares = shared_out(parameters, len(self._ranks))
        self._buckets = [list(buckets(share)) for share in shares]
        self.share = make([{"params": shares[dist.get_rank(group)]}])

    def step(self, *, run_ahead: RunAhead, timeout_s: float) -> None:
        """Update this rank's share, send it, and receive the others'."""
        self.share.step()
        for rank, owned in zip(self._ranks, self._buckets, strict=True):
            for bucket in owned:
                self._send(bucket, rank, run_ahead, timeout_s)

    @torch.no_grad()
    def _send(self, bucket: Sequence[nn.Parameter], rank: int, run_ahead: RunAhead, timeout_s: float) -> None:
        """Give the values that ``rank`` has of ``bucket`` to all of the group."""
        together = len(bucket) > 1 or not bucket[0].is_contiguous()
        flat = torch.cat([parameter.flatten() for parameter in bucket]) if together else bucket[0].data
        with waiting_for(_WHAT, timeout_s):
            work = dist.broadcast(flat, rank, group=self._group, async_op=True)
        run_ahead.wait(work, _WHAT)
        if together and rank != dist.get_rank():
            pieces = flat.split([parameter.numel() for parameter in bucket])
            for parameter, piece in zip(bucket, pieces, strict=True):
                parameter.data.copy_(piece.view(parameter.shape))


def shared_out(parameters: Sequence[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
    """The parameters that each of so many ranks updates, of about equally many elements together."""
    shares: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for parameter in sorted(parameters, key=torch.numel, reverse=True):
        least = sizes.index(min(sizes))
        shares[least].append(parameter)
        sizes[least] += parameter.numel()
    return shares


def buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """``parameters`` in order, in buckets of one type, of one parameter or of at most BUCKET_BYTES."""
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
