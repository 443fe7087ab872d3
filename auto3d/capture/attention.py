"""The attention kernel of a device, run on meta tensors to learn what autograd keeps.

On the meta device, ``scaled_dot_product_attention`` is unfused and keeps the whole matrix of attention weights.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def fused_attention(
    device: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Callable[[], Any] | None:
    """A call of the fused kernel of ``device``, "cpu" or "cuda", whose first result is the output of the attention.

    None if torch has no fused kernel for these arguments on that device.
    """
    mask = None if attn_mask is None else attn_mask.to(query.dtype)
    if device == "cuda":
        return _on_cuda(query, key, value, mask, dropout_p, is_causal, scale)
    same_heads = query.shape[-1] == value.shape[-1]  # false in multi-head latent attention
    if not same_heads or dropout_p > 0 or (mask is not None and mask.requires_grad):
        return None
    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    return lambda: kernel(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)


def _on_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Callable[[], Any] | None:
    """The kernel that aten/src/ATen/native/transformers/cuda/sdp_utils.cpp chooses from compute capability 8.0 on.

    Flash attention takes half precision without a mask; memory-efficient attention takes most other cases. Both keep
    one number per row of the matrix and no dropout mask. cuDNN's kernel, which Hopper prefers to flash attention, keeps
    as much. With fewer heads of keys than of queries, only flash attention works (PyTorch's pull request 191085, after
    2.13, adds the other).
    """
    half = query.dtype in _HALF
    head, value_head = query.shape[-1], value.shape[-1]
    tensors = [tensor for tensor in (query, key, value, mask) if tensor is not None]
    if query.dim() != 4 or not (half or query.dtype is torch.float32) or any(t.stride(-1) != 1 for t in tensors):
        return None
    square = not is_causal or query.shape[-2] == key.shape[-2]
    if half and mask is None and square and head == value_head <= 256:

        def flash() -> torch.Tensor:
            padded = [_padded(tensor, 8) for tensor in (query, key, value)]
            return aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0][..., :head]

        return flash
    alignment = 8 if half else 4
    if query.shape[1] != key.shape[1] or head % alignment or value_head % alignment:
        return None

    def efficient() -> Any:
        bias = None if mask is None else _padded(mask, 16)[..., : mask.shape[-1]]
        kernel = aten._scaled_dot_product_efficient_attention.default
        return kernel(query, key, value, bias, True, dropout_p, is_causal, scale=scale)

    return efficient


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """``tensor`` with its last dimension padded by zeros to a multiple of ``multiple``, as the kernels require."""
    missing = -tensor.shape[-1] % multiple
    return pad(tensor, (0, missing)) if missing else tensor
