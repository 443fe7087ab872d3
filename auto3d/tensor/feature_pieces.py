"""How a model divides the features of a product's result: into fused blocks, such as query, key and value, and heads.

The features are followed through the operations that only rearrange a tensor. For this, these operations run on views
of a tensor without memory that has one element for each feature; all other dimensions of a view have stride 0. Where
the features arrive at another operation, offset and strides of the view say which features it gets, in which order.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import fx

# fmt: off
_SAME = {  # the result has the features of the first argument, in its order
    "add", "alias", "clone", "contiguous", "detach", "div", "dropout", "mul", "neg", "sub", "to", "_to_copy", "type_as",
}
_RESHAPES = {"flatten", "reshape", "unflatten", "view", "_unsafe_view"}
_VIEWS = {
    "chunk", "expand", "movedim", "narrow", "permute", "select", "slice", "split", "split_with_sizes", "squeeze",
    "swapaxes", "t", "transpose", "unbind",
}
# fmt: on


@dataclass(frozen=True, slots=True)
class FeatureBlock:
    """``size`` consecutive features that are divided into ``units`` equal parts, which must stay whole.

    There is 1 unit if the model reads parts of the block that overlap in another way.
    """

    size: int
    units: int
    has_heads: bool  # the model gives them a dimension of the units, as it does for attention heads


@dataclass(frozen=True, slots=True)
class _Piece:
    """Features that one operation reads: their offset, and (size, stride) of their dimensions, outermost first."""

    offset: int
    dims: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        return self.offset + sum((size - 1) * stride for size, stride in self.dims) + 1

    @property
    def units(self) -> int:
        return self.dims[0][0] if self.dims else 1


def feature_blocks(
    result: fx.Node, dim: int, features: int, parameters: Mapping[str, str]
) -> tuple[list[FeatureBlock], list[str]]:
    """The blocks of the ``features`` along ``dim`` of ``result``, and the parameters that are added to them.

    ``parameters`` maps placeholders to names.
    """
    shape = result.meta["val"].shape
    strides = [0] * len(shape)
    strides[dim] = 1
    start = torch.empty(features, device="meta").as_strided(tuple(shape), strides)
    biases: dict[str, None] = {}
    pieces = sorted(set(_pieces(result, start, features, parameters, biases)), key=lambda piece: piece.offset)
    groups: list[list[_Piece]] = []  # pieces of one block overlap
    end = 0
    for piece in pieces:
        if not groups or piece.offset >= end:
            groups.append([])
        groups[-1].append(piece)
        end = max(end, piece.end)
    bounds = [0, *(group[0].offset for group in groups[1:]), features]
    blocks = []
    for group, (first, last) in zip(groups, pairwise(bounds), strict=True):
        units = {piece.units for piece in group}
        heads = any(len(piece.dims) > 1 for piece in group)
        blocks.append(FeatureBlock(last - first, units.pop() if len(units) == 1 else 1, heads))
    return blocks, list(biases)


def _pieces(
    node: fx.Node, view: torch.Tensor, features: int, parameters: Mapping[str, str], biases: dict[str, None]
) -> Iterator[_Piece]:
    """What each operation after ``node`` reads of the features; ``view`` stands for them. Adds to ``biases``."""
    for user in node.users:
        following = _after(user, node, view)
        if following is None:
            yield _piece(view)
            continue
        added = [
            parameters[arg.name]
            for arg in user.args
            if isinstance(arg, fx.Node) and arg.name in parameters and arg.meta["val"].shape == (features,)
        ]
        if view.dim() and view.stride(-1) == 1 and view.shape[-1] == features:
            biases.update(dict.fromkeys(added if _name(user) == "add" else []))
        if isinstance(following, torch.Tensor):
            yield from _pieces(user, following, features, parameters, biases)
            continue
        for taken in user.users:
            if taken.target is operator.getitem:
                yield from _pieces(taken, following[taken.args[1]], features, parameters, biases)
            else:
                yield _piece(view)


def _piece(view: torch.Tensor) -> _Piece:
    dims = sorted(
        ((size, stride) for size, stride in zip(view.shape, view.stride(), strict=True) if stride),
        key=lambda dim: -dim[1],
    )
    while len(dims) > 1 and dims[-1][0] == 1:
        dims.pop()
    return _Piece(int(view.storage_offset()), tuple(dims))


def _after(user: fx.Node, node: fx.Node, view: torch.Tensor) -> Any:
    """The view, or views, after the operation ``user``; None if ``user`` does more than rearrange."""
    name = _name(user)
    if not user.args or user.args[0] is not node:
        return None
    if name in _SAME:
        return view if tuple(user.meta["val"].shape) == tuple(view.shape) else None
    if name == "unsqueeze":
        dim = user.args[1]
        assert isinstance(dim, int)
        place = dim % (view.dim() + 1)
        strides = list(view.stride())
        return view.as_strided(tuple(user.meta["val"].shape), [*strides[:place], 0, *strides[place:]])
    if name in _RESHAPES:
        try:
            return view.view(tuple(user.meta["val"].shape))
        except RuntimeError:  # it would have to copy, so the features do not stay in order
            return None
    if name not in _VIEWS:
        return None
    return user.target(view, *user.args[1:], **user.kwargs)  # type: ignore[operator]


def input_units(value: fx.Node, features: int) -> int | None:
    """The heads whose features make up the last dimension of ``value``; None if no such dimension was merged."""
    while value.op == "call_function" and value.args and isinstance(value.args[0], fx.Node):
        source = value.args[0]
        if _name(value) in _RESHAPES:
            before: Sequence[int] = source.meta["val"].shape
            for count in range(2, len(before) + 1):
                if prod(before[-count:]) == features and before[-1] != features:
                    return before[-count]
            if not before or before[-1] != features:
                return None
        elif _name(value) not in _SAME or source.meta["val"].shape != value.meta["val"].shape:
            return None
        value = source
    return None


def _name(node: fx.Node) -> str:
    """The name of the node's ATen operator without its overload; empty for other nodes."""
    target = node.target
    return target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else ""
