"""What a module returns while it is traced, where torch.export would refuse it or eager mode gives another value."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


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


@contextmanager
def returning_tensors(module: nn.Module) -> Iterator[None]:
    """Leave out of the result of ``module`` what torch.export does not know, such as a cache of keys and values."""
    kind = type(module)
    forward, depth = kind.forward, 0

    @wraps(forward)
    def returning(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            result = forward(*args, **kwargs)
        finally:
            depth -= 1
        if depth or not isinstance(result, Mapping):  # a part of the model may be of its class
            return result
        known = {name: value for name, value in result.items() if all(map(_is_exported, tree_leaves(value)))}
        return result if len(known) == len(result) else type(result)(**known)

    with patch.object(kind, "forward", returning):
        yield


def _is_exported(value: Any) -> bool:
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)
