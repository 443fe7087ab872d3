"""Clipping of gradients before an update, element by element or row by row: the norm of all gradients is not needed."""

from collections.abc import Sequence

import torch
from torch import nn

from auto3d.runtime.settings import OptimizerSettings

_LEAST_NORM = 1e-3  # taken for rows of weights with less, so that zeros can grow (Brock and others, section 4.1)


@torch.no_grad()
def clip(parameters: Sequence[nn.Parameter], settings: OptimizerSettings) -> None:
    """Clip the gradients of ``parameters``, which are whole for ``settings.clip_ratio``.

    ``clip_ratio`` is adaptive gradient clipping (Brock and others, 2021, "High-performance large-scale image
    recognition without normalization", equation 3): the norm of a row of a gradient is at most that part of the norm of
    its row of weights. A vector is one row; a row of a convolution's weight is what makes one output channel.
    """
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if settings.clip_value:
            parameter.grad.clamp_(-settings.clip_value, settings.clip_value)
        if settings.clip_ratio:
            largest = _norms_of_rows(parameter).clamp(min=_LEAST_NORM) * settings.clip_ratio
            norms = _norms_of_rows(parameter.grad)
            parameter.grad.mul_((largest / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0))


def _norms_of_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The norm of each row, with its dimensions; of a vector or a number, the norm of all elements."""
    if tensor.dim() < 2:
        return torch.linalg.vector_norm(tensor)
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.dim())), keepdim=True)
