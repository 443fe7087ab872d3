"""Sums among CPU ranks as the simulated NCCL makes them: in the order of the ranks, in float32 or wider, rounded once.

gloo has another order for each part of a buffer, and rounds after every addition. With these sums, a run on CPUs equals
the same run on simulated GPUs in bits wherever their kernels are the same.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from auto3d.runtime.messages import slice_collectives
from auto3d.runtime.messages.slice_collectives import Begun

ALL_REDUCE = dist.all_reduce


class OrderedSum:
    """A sum that has begun, in the form of torch's Work: all ranks gather ``parts``, and ``wait`` adds them."""

    def __init__(self, result: torch.Tensor, group: Any) -> None:
        self._result = result
        self._parts = [torch.empty_like(result) for _ in range(dist.get_world_size(group))]
        self._work = dist.all_gather(self._parts, result.contiguous(), group=group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        if self._parts:
            first, *others = self._parts
            total = first.to(torch.promote_types(first.dtype, torch.float32))
            for part in others:
                total = total + part
            self._result.copy_(total)
            self._parts = []

    def is_completed(self) -> bool:
        return self._work.is_completed()


def all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> OrderedSum | dist.Work | None:
    """``dist.all_reduce``, whose sums of floating-point numbers are ordered."""
    if op != dist.ReduceOp.SUM or not tensor.is_floating_point():
        return ALL_REDUCE(tensor, op=op, group=group, async_op=async_op)
    begun = OrderedSum(tensor, group)
    if async_op:
        return begun
    begun.wait()
    return None


def reduce_scatter(buffer: torch.Tensor, group: dist.ProcessGroup, ranks: Sequence[int]) -> Begun:
    """``slice_collectives.reduce_scatter``, whose sum is ordered."""
    whole, mine = buffer.clone(), ranks.index(dist.get_rank())

    def keep_slice() -> None:
        buffer.view(len(ranks), -1)[mine].copy_(whole.view(len(ranks), -1)[mine])

    return Begun([OrderedSum(whole, group)], keep_slice)  # type: ignore[list-item]


def order_sums() -> None:
    """Let all sums of this process be ordered."""
    setattr(dist, "all_reduce", all_reduce)  # noqa: B010
    setattr(slice_collectives, "reduce_scatter", reduce_scatter)  # noqa: B010
