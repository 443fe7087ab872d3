"""Before the first iteration: all ranks that hold a parameter or buffer hold the same bits of it.

Nothing corrects replicas that begin apart: their gradients are summed and each goes its own way, without a word.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from auto3d.errors import InputError
from auto3d.runtime.waiting import waiting_for

_WORD_BYTES = 8
_ROW = 512  # words that are summed with one weight
_ODD = -7046029254386353131  # 2**64 / the golden ratio, as a signed number: spreads the weights of rows
_NOT_HELD = torch.iinfo(torch.int64).min


class WeightsDifferError(InputError):
    """Ranks that hold the same tensor would begin with different values of it."""


def check_agreement(
    tensors: Mapping[str, torch.Tensor],
    names: Sequence[str],
    *,
    device: torch.device,
    cause: str,
    timeout_s: float,
) -> None:
    """Raise WeightsDifferError, on every rank, unless all ranks that have a tensor in ``tensors`` have the same bits.

    ``names`` are those that any rank may have, in an order that all ranks share; every rank must call this. ``cause``
    says what is likely wrong. It costs one reading of ``tensors``, and one all-reduce of two numbers for each name.
    """
    absent = torch.tensor(_NOT_HELD, device=device)
    # The largest fingerprint of each name and, as its complement, the smallest.
    bounds = torch.stack([absent.expand(2)] * len(names)) if names else absent.new_empty(0, 2)
    for row, name in enumerate(names):
        if name in tensors:
            own = fingerprint(tensors[name])
            bounds[row] = torch.stack([own, ~own])
    present = bounds.cpu()
    bounds = present.clone()
    with waiting_for("the fingerprints of the initial weights", timeout_s):
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    largest, smallest = bounds[:, 0], ~bounds[:, 1]
    differs = ((largest != smallest) & (largest != _NOT_HELD)).nonzero().flatten().tolist()
    if not differs:
        return
    found: list[int | None] = [None] * dist.get_world_size()
    with waiting_for("the fingerprints of all ranks", timeout_s):
        dist.all_gather_object(found, present[differs[0], 0].item() if names[differs[0]] in tensors else None)
    groups: dict[int, list[str]] = {}
    for rank, value in enumerate(found):
        if value is not None:
            groups.setdefault(value, []).append(str(rank))
    ranks = " and ".join(f"rank{'s' * (len(group) > 1)} {', '.join(group)}" for group in groups.values())
    others = f" (and {len(differs) - 1} more)" if len(differs) > 1 else ""
    raise WeightsDifferError(f"{names[differs[0]]}{others}: its initial values differ between {ranks}; {cause}")


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """An integer of 64 bits of the tensor's bits and their places, on its device; any one changed bit changes it."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    whole = data.numel() // (_ROW * _WORD_BYTES) * _ROW * _WORD_BYTES
    rest = torch.zeros(_ROW * _WORD_BYTES, dtype=torch.uint8, device=data.device)
    rest[: data.numel() - whole] = data[whole:]
    rows = torch.cat([part.view(torch.int64).view(-1, _ROW).sum(dim=1) for part in (data[:whole], rest)])
    weights = torch.arange(rows.numel(), device=rows.device) * 2 + 1  # odd: no multiple of one loses a bit
    return (rows * (weights * _ODD)).sum()
