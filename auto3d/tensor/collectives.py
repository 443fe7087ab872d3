"""The operators that a tensor-parallel program has besides the model's.

Here they are declared with their shapes and with what autograd keeps of them, so that a program can be described on
meta tensors. On real tensors they fail: a rank runs them through its process group (runtime/messages/tensor_group.py).

A conversion changes the placement of a value, and in the backward the placement of its gradient:

| operator | from → to | forward | backward |
| --- | --- | --- | --- |
| reduce | partial → whole | all-reduce | nothing |
| copy | whole → copied | nothing | all-reduce |
| reduce_copy | partial → copied | all-reduce | all-reduce |
| gather | split → whole | all-gather | slice |
| gather_copy | split → copied | all-gather | reduce-scatter |
| scatter | whole → split | slice | all-gather |
| scatter_copy | copied → split | slice | pad with zeros |
| reduce_scatter | partial → split | reduce-scatter | all-gather |
| spread | whole → partial | rank 0 keeps it, the others have zeros | nothing |

The operators of a vocabulary take its rows, or its classes, as they are split among the ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from auto3d.conversions import CONVERSIONS, Conversion
from auto3d.tensor_placement import PlacementKind, Split

_LIBRARY = torch.library.Library("auto3d", "DEF")


def split_of(args: Sequence[Any]) -> Split | None:
    """How a conversion with the arguments ``args`` splits the tensor; None if it does not."""
    _, dim, blocks = args[1:]
    return Split(dim, tuple(blocks)) if blocks else None


def _fail_on_real(tensor: torch.Tensor, name: str) -> None:
    if tensor.device.type != "meta":
        raise RuntimeError(f"auto3d.{name} runs only on the ranks of a tensor-parallel group")


class _Convert(torch.autograd.Function):
    """A conversion on meta tensors. It keeps nothing for its backward."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, conversion: Conversion, shards: int, split: Split | None
    ) -> torch.Tensor:
        ctx.shape = value.shape
        if conversion.name == "copy":
            return value.view_as(value)
        if split is None:
            return value.new_empty(value.shape)
        gathers = conversion.source is PlacementKind.SPLIT
        return value.new_empty(split.whole_shape(value.shape) if gathers else split.local_shape(value.shape, shards))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return gradient.new_empty(ctx.shape), None, None, None


def _declare(conversion: Conversion) -> None:
    view = "(a)" if conversion.name == "copy" else ""
    _LIBRARY.define(f"{conversion.name}(Tensor{view} value, int shards, int dim, int[] blocks) -> Tensor{view}")

    def run(value: torch.Tensor, shards: int, dim: int, blocks: Sequence[int]) -> torch.Tensor:
        _fail_on_real(value, conversion.name)
        return _Convert.apply(value, conversion, shards, Split(dim, tuple(blocks)) if blocks else None)

    _LIBRARY.impl(conversion.name, run, "CompositeImplicitAutograd")


for _each in CONVERSIONS.values():
    _declare(_each)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        ctx.shape = weight.shape
        ctx.save_for_backward(indices)
        return weight.new_empty((*indices.shape, weight.shape[1]))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return gradient.new_empty(ctx.shape), None


_LIBRARY.define("vocabulary_embedding(Tensor weight, Tensor indices, int padding_idx, int size, int shards) -> Tensor")


def _vocabulary_embedding(
    weight: torch.Tensor, indices: torch.Tensor, padding_idx: int, size: int, shards: int
) -> torch.Tensor:
    """The rows of ``indices`` that this rank has, [*indices, width], and zeros for the others: a partial value.

    ``weight`` is the rank's shard, [ceil(size / shards), width], of ``size`` rows; the row ``padding_idx`` of the whole
    weight, if it is not negative, gets no gradient.
    """
    _fail_on_real(weight, "vocabulary_embedding")
    return _Lookup.apply(weight, indices)


_LIBRARY.impl("vocabulary_embedding", _vocabulary_embedding, "CompositeImplicitAutograd")


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, reduction: int) -> torch.Tensor:
        ctx.save_for_backward(torch.empty_like(logits), labels)  # the probabilities
        return logits.new_empty(labels.shape if reduction == 0 else ())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return torch.empty_like(ctx.saved_tensors[0]), None, None


_LIBRARY.define(
    "vocabulary_cross_entropy(Tensor logits, Tensor labels, int reduction, int ignore_index, float label_smoothing, "
    "int size, int shards) -> Tensor"
)


def _vocabulary_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    size: int,
    shards: int,
) -> torch.Tensor:
    """torch's cross_entropy_loss of ``labels``, [tokens], and logits whose ``size`` classes are split: a whole value.

    ``logits`` is the rank's shard, [tokens, ceil(size / shards)]; ``reduction`` is 0 for none, 1 for the mean and 2 for
    the sum, as in torch. In its forward the ranks all-reduce two tensors: the maximum of each token's logits, then the
    sum of its exponentials together with the logit of its label.
    """
    _fail_on_real(logits, "vocabulary_cross_entropy")
    return _Loss.apply(logits, labels, reduction)


_LIBRARY.impl("vocabulary_cross_entropy", _vocabulary_cross_entropy, "CompositeImplicitAutograd")

VOCABULARY_EMBEDDING = torch.ops.auto3d.vocabulary_embedding.default
VOCABULARY_CROSS_ENTROPY = torch.ops.auto3d.vocabulary_cross_entropy.default


def operator_of(conversion: Conversion) -> Callable:
    return getattr(torch.ops.auto3d, conversion.name).default
