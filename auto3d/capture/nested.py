"""What an nn.TransformerEncoder gives at padding in evaluation, where torch runs it without the padding."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn


@contextmanager
def padding_as_nested() -> Iterator[None]:
    """Trace an nn.TransformerEncoder with padding, and let its result there be what nested tensors would give.

    torch.export runs the layers on padded tensors. Nested tensors have nothing at padding, and their result is padded
    with zeros before the last norm. torch takes them for a batch of which each sample begins with its tokens, so a
    sample that does not is left as it is.
    """
    forward = nn.TransformerEncoder.forward

    def padded(encoder: nn.TransformerEncoder, src: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = forward(encoder, src, *args, **kwargs)
        given = dict(zip(("mask", "src_key_padding_mask"), args, strict=False)) | kwargs
        padding = given.get("src_key_padding_mask")
        nested = getattr(encoder, "use_nested_tensor", False) and not encoder.layers[0].training and src.dim() == 3
        if not nested or padding is None or given.get("mask") is not None or torch.is_autocast_enabled():
            return result
        if padding.is_floating_point():
            padding = padding != 0
        begins_with_tokens = ~(padding[:, :-1] & ~padding[:, 1:]).any(1, keepdim=True)
        nothing = torch.zeros_like(result)
        if encoder.norm is not None:
            nothing = encoder.norm(nothing)
        return torch.where((padding & begins_with_tokens).unsqueeze(-1), nothing, result)

    with patch.object(nn.TransformerEncoder, "forward", padded):
        yield
