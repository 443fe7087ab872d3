"""Before the first iteration: all ranks that hold a parameter or buffer hold the same bits of it.

Nothing corrects replicas that begin apart: their gradients are summed and each goes its own way, without a word.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from auto3d.errors import InputError
from auto3d.runtime.gradient_sync import Holders
from auto3d.runtime.waiting import waiting_for

_WORD_BYTES = 8
_ROW = 4096  # words that are summed with one weight
_ODD = -7046029254386353131  # 2**64 / the golden ratio, as a signed number: spreads the weights of rows
_NOT_HELD = torch.iinfo(torch.int64).min


class WeightsDifferError(InputError):
    """Ranks that hold the same tensor would begin with different values of it."""


def check_agreement(
    tensors: Mapping[str, torch.Tensor], holders: Mapping[str, Holders], *, cause: str, timeout_s: float
) -> None:
    """Raise WeightsDifferError, on every rank, unless all ``holders`` of a tensor hold the same bits.

    ``tensors`` are this rank's. Every rank must call this, with the same ``holders``. ``cause`` says what is likely
    wrong. It costs one reading of the tensors that several ranks hold, and one all-reduce of two numbers for each.
    """
    shared = {name: each for name, each in holders.items() if len(each.ranks) > 1}
    if not shared:
        return
    own = [fingerprint(tensors[name]) if name in tensors else None for name in shared]
    device = next(iter(tensors.values())).device
    absent = torch.tensor(_NOT_HELD, device=device)
    # The largest fingerprint and, as its complement, the smallest.
    bounds = torch.stack([torch.stack([absent if f is None else f, absent if f is None else ~f]) for f in own])
    with waiting_for("the fingerprints of the initial weights", timeout_s):
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    differs = (bounds[:, 0] != ~bounds[:, 1]).tolist()
    if not any(differs):
        return
    name, value = next((name, f) for name, f, apart in zip(shared, own, differs, strict=True) if apart)
    found: list[int | None] = [None] * dist.get_world_size()
    with waiting_for("the fingerprints of all ranks", timeout_s):
        dist.all_gather_object(found, None if value is None else value.item())
    groups: dict[int, list[int]] = {}
    for rank in shared[name].ranks:
        groups.setdefault(found[rank], []).append(rank)
    ranks = " and ".join(f"{'ranks' if len(g) > 1 else 'rank'} {', '.join(map(str, g))}" for g in groups.values())
    others = f" (and {sum(differs) - 1} more)" if sum(differs) > 1 else ""
    raise WeightsDifferError(f"{name}{others}: its initial values differ between {ranks}; {cause}")


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """An integer of 64 bits of the tensor's bits and their places, on its device; any one changed bit changes it."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.data_ptr() % _WORD_BYTES:
        data = data.clone()
    whole = data.numel() // (_ROW * _WORD_BYTES) * _ROW * _WORD_BYTES
    rest = torch.zeros(_ROW * _WORD_BYTES, dtype=torch.uint8, device=data.device)
    rest[: data.numel() - whole] = data[whole:]
    rows = torch.cat([part.view(torch.int64).view(-1, _ROW).sum(dim=1) for part in (data[:whole], rest)])
    weights = torch.arange(rows.numel(), device=rows.device) * 2 + 1  # odd: no multiple of one loses a bit
    return (rows * (weights * _ODD)).sum()
