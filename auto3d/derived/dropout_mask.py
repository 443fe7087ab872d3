"""The mask of a dropout as an operation of its own, for programs that multiply by it in parts."""

import torch

from auto3d.tensor.rules.call import Call

_LIBRARY = torch.library.Library("auto3d", "FRAGMENT")
_LIBRARY.define(
    "dropout_mask(int[] size, int[] stride, float p, ScalarType dtype, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _dropout_mask(
    size: list[int], stride: list[int], p: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """What a dropout of a tensor of this ``size`` and ``stride`` multiplies it by: 0, or 1 / (1 - p)."""
    ones = torch.empty_strided(size, stride, dtype=dtype, device=device).fill_(1)
    return torch.dropout(ones, p, True)


_LIBRARY.impl("dropout_mask", _dropout_mask, "CompositeExplicitAutograd")
DROPOUT_MASK = torch.ops.auto3d.dropout_mask.default


def mask_arguments(call: Call) -> tuple:
    """The arguments of DROPOUT_MASK that draw the mask of the dropout ``call``, for all of its operand."""
    value = call.operands[0].meta["val"]
    layout = list(value.shape), list(value.stride())
    return *layout, float(call.argument("p")), value.dtype, torch.device("meta")
