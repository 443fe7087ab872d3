"""Elementwise expressions for tensors that are too large to hold, with bounds per block of rows and columns.

Every tensor here is compact: a dimension along which elements only repeat has size 1, as before an expand.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, prod
from typing import Any

import torch

BLOCKS = 512  # blocks along rows and along columns; all are bounded before any is evaluated
STRIP_ELEMENTS = 2**24  # elements evaluated at once, over all operations of an expression
MOST_ELEMENTS = 2**31  # most elements evaluated of one expression, about 10 s

Bounds = tuple[torch.Tensor, torch.Tensor]  # least and greatest element of each block, in the elements' dtype

aten = torch.ops.aten


class UndecidedError(Exception):
    """Computing the elements would take too much memory or time."""


@dataclass(frozen=True, eq=False)
class Pointwise:
    """An elementwise operator and its arguments; each operand has as many dimensions as the result, or none."""

    target: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    shape: torch.Size = field(init=False)  # compact

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", torch.broadcast_shapes(*(operand.shape for operand in self.operands)))

    @property
    def operands(self) -> "list[Expression]":
        return [argument for argument in self.args if isinstance(argument, (torch.Tensor, Pointwise))]

    def args_with(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments, with ``operands`` in place of the present operands."""
        following = iter(operands)
        return tuple(
            next(following) if isinstance(argument, (torch.Tensor, Pointwise)) else argument for argument in self.args
        )


Expression = torch.Tensor | Pointwise


def elements(expression: Expression) -> torch.Tensor:
    """All elements of ``expression``, compact."""
    return _fold(_in_order(expression), lambda tensor: tensor, _call)


def restructured(expression: Expression, change: Callable[[torch.Tensor], torch.Tensor]) -> Expression:
    """``expression`` after an operator that only moves elements, with which elementwise operators commute.

    ``change`` applies the operator to a compact tensor. A tensor without dimensions stays: it broadcasts to any shape.
    """

    def changed(node: Pointwise, operands: list[Expression]) -> Pointwise:
        return Pointwise(node.target, node.args_with(operands), node.kwargs, node.dtype)

    return _fold(_in_order(expression), lambda tensor: change(tensor) if tensor.dim() else tensor, changed)


def bounded(expression: Expression, block: int) -> Bounds | None:
    """Bounds of ``expression`` in blocks of ``block`` rows and columns; None where no bounds are known."""
    return _fold(_in_order(expression), lambda tensor: _block_bounds(tensor, block), _bounds)


def is_false(expression: Expression, rows: int, columns: int) -> bool:
    """Whether every element of the Boolean ``expression`` is false, broadcast to ``rows`` and ``columns``.

    Interval arithmetic bounds blocks of rows and columns first; the blocks that it leaves open are evaluated element by
    element. Leading dimensions are included. Raises UndecidedError where that takes too much memory or time.
    """
    block = ceil(max(rows, columns) / BLOCKS)
    bounds = bounded(expression, block)
    assert bounds is not None  # a Boolean expression has the bounds false and true where nothing else is known
    surely, possibly = bounds
    if surely.any():
        return False
    grid = (ceil(rows / block), ceil(columns / block))
    possibly = possibly.reshape(possibly.shape[-2:]).expand(grid)  # leading dimensions are one block each
    strips = []  # (first row, first column, end column) of the open blocks in each row of blocks
    for number in possibly.any(1).nonzero().flatten().tolist():
        open_blocks = possibly[number].nonzero().flatten()
        end = min((int(open_blocks[-1]) + 1) * block, columns)
        strips.append((number * block, int(open_blocks[0]) * block, end))
    order = _in_order(expression)
    leading = prod(expression.shape[:-2])
    if sum(block * (end - begin) for _, begin, end in strips) * leading > MOST_ELEMENTS:
        raise UndecidedError
    for first_row, begin, end in strips:
        height = STRIP_ELEMENTS // (len(order) * leading * (end - begin))
        if not height:
            raise UndecidedError
        last_row = min(first_row + block, rows)
        for row in range(first_row, last_row, height):
            box = (slice(row, min(row + height, last_row)), slice(begin, end))
            if _fold(order, partial(_inside, box=box), _call).any():
                return False
    return True


def _in_order(expression: Expression) -> list[Expression]:
    """Each subexpression of ``expression`` once, after its operands. Expressions may be too deep for recursion."""
    order: dict[int, Expression] = {}
    pending = [expression]
    while pending:
        current = pending[-1]
        operands = current.operands if isinstance(current, Pointwise) else []
        missing = [operand for operand in operands if id(operand) not in order]
        pending += missing
        if not missing:
            order.setdefault(id(current), current)
            pending.pop()
    return list(order.values())


def _fold(order: Sequence[Expression], leaf: Callable[[torch.Tensor], Any], operation: Callable[..., Any]) -> Any:
    """The result for the last of ``order``, where each node is ``operation(node, results of its operands)``."""
    results: dict[int, Any] = {}
    for node in order:
        if isinstance(node, torch.Tensor):
            results[id(node)] = leaf(node)
        else:
            results[id(node)] = operation(node, [results[id(operand)] for operand in node.operands])
    return results[id(order[-1])]


def _call(node: Pointwise, operands: list[torch.Tensor]) -> torch.Tensor:
    return node.target(*node.args_with(operands), **node.kwargs)


def _inside(tensor: torch.Tensor, box: tuple[slice, slice]) -> torch.Tensor:
    """The elements of a compact ``tensor`` in ``box``, a pair of rows and columns."""
    if not tensor.dim():
        return tensor
    (rows, columns), every = box, slice(None)
    return tensor[..., rows if tensor.shape[-2] > 1 else every, columns if tensor.shape[-1] > 1 else every]


def _block_bounds(tensor: torch.Tensor, block: int) -> Bounds | None:
    """Bounds of the elements in each block; None where elements have no order."""
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.isnan().any()):
        return None
    if not tensor.dim():
        return tensor, tensor
    low = high = tensor
    if tensor.dim() > 2:
        leading = tuple(range(tensor.dim() - 2))
        low, high = tensor.amin(leading, keepdim=True), tensor.amax(leading, keepdim=True)
    for dim in (-2, -1):
        low = torch.cat([piece.amin(dim, keepdim=True) for piece in low.split(block, dim)], dim)
        high = torch.cat([piece.amax(dim, keepdim=True) for piece in high.split(block, dim)], dim)
    return low, high


# Operator -> sign for each operand: the result grows (1) or falls (-1) with the operand, also after rounding.
_COMPARISONS = {aten.le: (-1, 1), aten.lt: (-1, 1), aten.ge: (1, -1), aten.gt: (1, -1)}
_LOGICAL = {  # operators on Booleans
    aten.bitwise_and: (1, 1),
    aten.__and__: (1, 1),
    aten.logical_and: (1, 1),
    aten.bitwise_or: (1, 1),
    aten.__or__: (1, 1),
    aten.logical_or: (1, 1),
    aten.bitwise_not: (-1,),
    aten.logical_not: (-1,),
}
_ARITHMETIC = {aten.add: (1, 1), aten.sub: (1, -1)}  # bounds hold only if nothing overflows


def _bounds(node: Pointwise, operands: list[Bounds | None]) -> Bounds | None:
    """Bounds of the result of ``node`` for operands within their bounds; None where none are known for numbers."""
    known = [operand for operand in operands if operand is not None]
    bounds = _known_bounds(node, known) if len(known) == len(operands) else None
    if bounds is not None and any(bound.isnan().any() for bound in bounds):
        bounds = None
    if bounds is None and node.dtype is torch.bool:
        unknown = torch.zeros((1,) * len(node.shape), dtype=torch.bool)
        return unknown, ~unknown
    return bounds


def _known_bounds(node: Pointwise, operands: list[Bounds]) -> Bounds | None:
    packet = getattr(node.target, "overloadpacket", None)
    bounds = node.args_with(operands)
    if packet in _COMPARISONS:
        return _monotone(node, _COMPARISONS[packet], bounds)
    if packet in _LOGICAL and all(low.dtype is torch.bool for low, _ in operands):
        return _monotone(node, _LOGICAL[packet], bounds)
    if packet in _ARITHMETIC and not node.kwargs:
        result = _monotone(node, _ARITHMETIC[packet], bounds)
        exact = _monotone(node, _ARITHMETIC[packet], [_as_double(bound) for bound in bounds])
        return result if _equal(result, exact) else None
    if packet is aten.to:
        (low, high), dtype = bounds
        result = low.to(dtype), high.to(dtype)
        return result if _equal(result, (low, high)) else None
    if packet in (aten.eq, aten.ne):
        (first_low, first_high), (second_low, second_high) = map(_pair, bounds)
        surely = torch.le(first_high, second_low) & torch.ge(first_low, second_high)
        possibly = torch.le(first_low, second_high) & torch.ge(first_high, second_low)
        return (surely, possibly) if packet is aten.eq else (~possibly, ~surely)
    if packet in (aten.where, aten.masked_fill) and len(bounds) == 3:
        condition, chosen, other = bounds if packet is aten.where else (bounds[1], bounds[2], bounds[0])
        return _where_bounds(condition, _as_type(chosen, node.dtype), _as_type(other, node.dtype))
    return None


def _monotone(node: Pointwise, signs: Sequence[int], bounds: Sequence[Any]) -> Bounds:
    low = node.target(*(_pair(bound)[sign < 0] for bound, sign in zip(bounds, signs, strict=True)))
    high = node.target(*(_pair(bound)[sign > 0] for bound, sign in zip(bounds, signs, strict=True)))
    return low, high


def _where_bounds(condition: Bounds, chosen: Bounds, other: Bounds) -> Bounds:
    surely, possibly = condition
    low = torch.where(possibly, torch.minimum(chosen[0], other[0]), other[0])
    high = torch.where(possibly, torch.maximum(chosen[1], other[1]), other[1])
    return torch.where(surely, chosen[0], low), torch.where(surely, chosen[1], high)


def _pair(bound: Any) -> Any:
    return bound if isinstance(bound, tuple) else (bound, bound)


def _as_double(bound: Any) -> Any:
    return tuple(tensor.double() for tensor in bound) if isinstance(bound, tuple) else bound


def _as_type(bound: Any, dtype: torch.dtype) -> Bounds:
    low, high = _pair(bound)
    return torch.as_tensor(low, dtype=dtype), torch.as_tensor(high, dtype=dtype)


def _equal(computed: Bounds, exact: Bounds) -> bool:
    """Whether two computations agree on finite numbers, in which case nothing between the bounds overflows."""
    return all(
        bool((bound.double() == exact_bound.double()).all() and exact_bound.isfinite().all())
        for bound, exact_bound in zip(computed, exact, strict=True)
    )
