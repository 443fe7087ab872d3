"""Collectives on flat buffers, divided into equal slices that the ranks of a group own, in their order.

They are asynchronous: they end once every rank of the group has begun them, whatever else the ranks do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from auto3d.conversions import Collective

# torch 2.13 renames the two; the old names warn there.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


@dataclass(frozen=True, eq=False)
class Begun:
    """A collective that has begun: its ``works``, and what is left to do once they are done."""

    works: Sequence[dist.Work]
    finish: Callable[[], None] = field(default=lambda: None)


def begin(collective: Collective | None, buffer: torch.Tensor, group: dist.ProcessGroup, ranks: Sequence[int]) -> Begun:
    """Begin ``collective``, of those below."""
    if collective is Collective.ALL_REDUCE:
        return all_reduce(buffer, group)
    return (all_gather if collective is Collective.ALL_GATHER else reduce_scatter)(buffer, group, ranks)


def all_reduce(buffer: torch.Tensor, group: dist.ProcessGroup) -> Begun:
    """Begin to sum ``buffer`` over the ranks of ``group``, in place."""
    return Begun([_work(dist.all_reduce(buffer, group=group, async_op=True))])


def reduce_scatter(buffer: torch.Tensor, group: dist.ProcessGroup, ranks: Sequence[int]) -> Begun:
    """Begin to sum ``buffer`` over ``ranks``, all of ``group`` in order; each rank gets the sum of its slice, in place.

    The other slices keep this rank's numbers. The elements of ``buffer`` are a multiple of the ranks.
    """
    buffer = _real(buffer)
    slices = buffer.view(len(ranks), -1)
    mine = slices[ranks.index(dist.get_rank())]
    if dist.get_backend(group) != "gloo":
        return Begun([_work(getattr(dist, _REDUCE_SCATTER)(mine, buffer, group=group, async_op=True))])
    # gloo's reduce-scatter is an all-reduce (torch 2.13), which sends twice the bytes of these messages.
    others = [rank for rank in ranks if rank != dist.get_rank()]
    received = mine.new_empty(len(others), len(mine))
    works = [_work(dist.irecv(received[i], rank, group=group)) for i, rank in enumerate(others)]
    works += [_work(dist.isend(slices[ranks.index(rank)], rank, group=group)) for rank in others]

    def add() -> None:
        for tensor in received:
            mine.add_(tensor)

    return Begun(works, add)


def all_gather(buffer: torch.Tensor, group: dist.ProcessGroup, ranks: Sequence[int]) -> Begun:
    """Begin to fill ``buffer`` with the slice of each of ``ranks``, all of ``group`` in order."""
    buffer = _real(buffer)
    mine = buffer.view(len(ranks), -1)[ranks.index(dist.get_rank())]
    return Begun([_work(getattr(dist, _ALL_GATHER)(buffer, mine, group=group, async_op=True))])


def _real(buffer: torch.Tensor) -> torch.Tensor:
    """The numbers of ``buffer``; a complex one counts as two, because not every library has complex numbers."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # because it is asynchronous, and this rank belongs to the group
    return work
