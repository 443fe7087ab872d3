"""Checks before the first iteration that all ranks run one plan of one program, from the same weights.

Nothing would tell later. Ranks that captured different programs take one value for another where the two give it the
same name. Copies of a parameter that begin with different values stay different, since only their gradients are summed.
"""

from collections.abc import Hashable, Mapping, Sequence
from hashlib import sha256

import torch
import torch.distributed as dist

from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.waiting import waiting_for

_WORD_BYTES = 8
_ROW = 512  # number of words that are summed with one weight
_ODD = -7046029254386353131  # 2**64 / golden ratio, as a signed integer: it spreads the weights of rows
_NOT_HELD = torch.iinfo(torch.int64).min


class PlansDifferError(InputError):
    """Ranks captured different programs of the model, or would run different plans."""


class WeightsDifferError(InputError):
    """Ranks that hold copies of the same tensor would begin with different values."""


def check_same_plan(plan: Plan) -> None:
    """Raise PlansDifferError, on every rank, unless all ranks have the same ``plan`` of the same program.

    Every rank must call this. It does one all-reduce of two numbers.
    """
    number = int.from_bytes(sha256(plan.to_json().encode()).digest()[:7], "big")
    bounds = torch.tensor([number, -number])
    with waiting_for("the plans of all ranks"):
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    if not bounds.sum().item():  # the largest number less the smallest
        return
    programs: list[tuple[str, int] | None] = [None] * dist.get_world_size()
    with waiting_for("the fingerprints of all ranks' programs"):
        dist.all_gather_object(programs, (plan.graph, number))
    graphs = [graph for graph, _ in filter(None, programs)]
    if len(set(graphs)) == 1:
        raise PlansDifferError(f"plan: it differs between {_groups(programs)}; give all ranks the same arguments")
    raise PlansDifferError(
        f"graph: the model's code does other operations, or in another order, on {_groups(graphs)}; where it goes "
        "through a set of strings, let it sort them, or start all processes with PYTHONHASHSEED=0"
    )


def check_agreement(
    tensors: Mapping[str, torch.Tensor],
    names: Sequence[str],
    *,
    device: torch.device,
    cause: str,
) -> None:
    """Raise WeightsDifferError, on every rank, unless all ranks with the same tensor in ``tensors`` have the same bits.

    Every rank must call this, with the same ``names`` in the same order: all names that any rank may have. ``cause`` is
    the likely cause, for the error. It reads ``tensors`` once and does one all-reduce of two numbers per name.
    """
    absent = torch.tensor(_NOT_HELD, device=device)
    # For each name, the largest fingerprint and the complement of the smallest.
    bounds = torch.stack([absent.expand(2)] * len(names)) if names else absent.new_empty(0, 2)
    for row, name in enumerate(names):
        if name in tensors:
            local = fingerprint(tensors[name])
            bounds[row] = torch.stack([local, ~local])
    present = bounds.cpu()
    bounds = present.clone()
    with waiting_for("the fingerprints of the initial weights"):
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    largest, smallest = bounds[:, 0], ~bounds[:, 1]
    differs = ((largest != smallest) & (largest != _NOT_HELD)).nonzero().flatten().tolist()
    if not differs:
        return
    values: list[int | None] = [None] * dist.get_world_size()
    with waiting_for("the fingerprints of all ranks"):
        dist.all_gather_object(values, present[differs[0], 0].item() if names[differs[0]] in tensors else None)
    others = f" (and {len(differs) - 1} more)" if len(differs) > 1 else ""
    raise WeightsDifferError(
        f"{names[differs[0]]}{others}: its initial values differ between {_groups(values)}; {cause}"
    )


def _groups(values: Sequence[Hashable | None]) -> str:
    """The ranks with equal ``values``, in words: ``ranks 0, 2 and rank 1``. A rank whose value is None is left out."""
    groups: dict[Hashable, list[str]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            groups.setdefault(value, []).append(str(rank))
    return " and ".join(f"rank{'s' * (len(group) > 1)} {', '.join(group)}" for group in groups.values())


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit fingerprint of the tensor's bits and their positions, on its device. Any one changed bit changes it."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    whole = data.numel() // (_ROW * _WORD_BYTES) * _ROW * _WORD_BYTES
    rest = torch.zeros(_ROW * _WORD_BYTES, dtype=torch.uint8, device=data.device)
    rest[: data.numel() - whole] = data[whole:]
    rows = torch.cat([words.view(torch.int64).view(-1, _ROW).sum(dim=1) for words in (data[:whole], rest)])
    weights = torch.arange(rows.numel(), device=rows.device) * 2 + 1  # odd: no multiple of one loses a bit
    return (rows * (weights * _ODD)).sum()
