"""The operators that the program of a slice has besides the model's."""

from typing import Any

import torch

from auto3d.errors import InputError

_LIBRARY = torch.library.Library("auto3d", "FRAGMENT")


class _WithEarlier(torch.autograd.Function):
    """The operator on meta tensors. It keeps nothing for its backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, dim: int, earlier: int) -> torch.Tensor:
        ctx.shape = value.shape
        return value.new_empty([size + earlier * (d == dim) for d, size in enumerate(value.shape)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return gradient.new_empty(ctx.shape), None, None


def _with_earlier(value: torch.Tensor, dim: int, earlier: int) -> torch.Tensor:
    """``value`` of a slice behind its ``earlier`` elements along ``dim``, which the slices before it have computed."""
    if value.device.type != "meta":
        raise RuntimeError("auto3d.with_earlier runs only in a stage, which keeps what earlier slices have computed")
    return _WithEarlier.apply(value, dim, earlier)


def _causal_rows(mask: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """The rows ``first`` to ``last`` - 1 of an attention mask [..., queries, keys], without keys from ``last`` on.

    Raises InputError if the mask lets one of these rows see a later key: it belongs to a slice that has not run yet.
    """
    later = mask[..., first:last, last:]
    if later.numel() and later.device.type != "meta":
        hides = ~later if later.dtype is torch.bool else later <= torch.finfo(later.dtype).min / 2
        if not hides.all():
            raise InputError(
                "schedule: slices of the sequence need causal attention, and a mask of this batch lets a token see a "
                "later slice; use a schedule without slices, such as 1f1b"
            )
    return mask[..., first:last, :last]


_LIBRARY.define("with_earlier(Tensor value, int dim, int earlier) -> Tensor")
_LIBRARY.impl("with_earlier", _with_earlier, "CompositeImplicitAutograd")
_LIBRARY.define("causal_rows(Tensor(a) mask, int first, int last) -> Tensor(a)")
_LIBRARY.impl("causal_rows", _causal_rows, "CompositeImplicitAutograd")

WITH_EARLIER = torch.ops.auto3d.with_earlier.default
CAUSAL_ROWS = torch.ops.auto3d.causal_rows.default
