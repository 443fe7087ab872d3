"""Tensors too large to hold, as elementwise expressions: evaluated in boxes of rows and columns, bounded in blocks.

Every tensor here is compact: a dimension along which its elements only repeat has size 1, as before an expand.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any

import torch

BLOCKS = 512  # along rows and along columns: each is bounded before any is evaluated
STRIP_ELEMENTS = 2**24  # evaluated at once, over all operations of an expression
MOST_ELEMENTS = 2**31  # evaluated of one expression, about 10 s

Bounds = tuple[torch.Tensor, torch.Tensor]  # least and greatest element of each block, in the type of the elements

aten = torch.ops.aten


class UndecidedError(Exception):
    """Finding out the elements would take too much memory or time."""


@dataclass(frozen=True, eq=False)
class Pointwise:
    """An elementwise operator and its arguments; its operands have as many dimensions as its result, or none."""

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
        """The arguments, with ``operands`` in the place of its own."""
        following = iter(operands)
        return tuple(
            next(following) if isinstance(argument, (torch.Tensor, Pointwise)) else argument for argument in self.args
        )


Expression = torch.Tensor | Pointwise


def elements(expression: Expression) -> torch.Tensor:
    """All elements of ``expression``, compact."""
    return _fold(_in_order(expression), lambda tensor: tensor, _call)


def restructured(expression: Expression, change: Callable[[torch.Tensor], torch.Tensor]) -> Expression:
    """``expression`` after an operator that only moves elements: elementwise operators commute with it.

    ``change`` applies it to a compact tensor. Tensors without dimensions stay: they broadcast to any shape.
    """

    def changed(node: Pointwise, operands: list[Expression]) -> Pointwise:
        return Pointwise(node.target, node.args_with(operands), node.kwargs, node.dtype)

    return _fold(_in_order(expression), lambda tensor: change(tensor) if tensor.dim() else tensor, changed)


def bounded(expression: Expression, block: int) -> Bounds | None:
    """Bounds of ``expression`` in blocks of so many rows and columns; None where nothing is known of it."""
    return _fold(_in_order(expression), lambda tensor: _block_bounds(tensor, block), _bounds)


def is_false(expression: Expression, rows: int, columns: int) -> bool:
    """Whether every element of the Boolean ``expression`` is false, broadcast to so many rows and columns.

    Blocks of rows and columns are bounded first, by interval arithmetic; what that leaves open is evaluated element by
    element. Leading dimensions are covered too. Raises UndecidedError where that is too much.
    """
    block = ceil(max(rows, columns) / BLOCKS)
    surely, possibly = bounded(expression, block)
    if surely.any():
        return False
    grid = (ceil(rows / block), ceil(columns / block))
    possibly = possibly.reshape(possibly.shape[-2:]).expand(grid)  # leading dimensions are one block each
    strips = []  # rows, and the columns of the first to the last block in question
    for number in possibly.any(1).nonzero().flatten().tolist():
        found = possibly[number].nonzero().flatten()
        strips.append((number * block, int(found[0]) * block, min((int(found[-1]) + 1) * block, columns)))
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
            if _fold(order, lambda tensor, box=box: _inside(tensor, *box), _call).any():
                return False
    return True


def _in_order(expression: Expression) -> list[Expression]:
    """Each part of ``expression`` once, after its operands; expressions may be too deep for recursion."""
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
    """Result of ``operation(part, results of its operands)`` for the last of ``order``."""
    results: dict[int, Any] = {}
    for part in order:
        if isinstance(part, torch.Tensor):
            results[id(part)] = leaf(part)
        else:
            results[id(part)] = operation(part, [results[id(operand)] for operand in part.operands])
    return results[id(order[-1])]


def _call(node: Pointwise, operands: list[torch.Tensor]) -> torch.Tensor:
    return node.target(*node.args_with(operands), **node.kwargs)


def _inside(tensor: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
    if not tensor.dim():
        return tensor
    every = slice(None)
    return tensor[..., rows if tensor.shape[-2] > 1 else every, columns if tensor.shape[-1] > 1 else every]


def _block_bounds(tensor: torch.Tensor, block: int) -> Bounds | None:
    """None where elements have no order."""
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.isnan().any()):
        return None
    if not tensor.dim():
        return tensor, tensor
    low = high = tensor
    if tensor.dim() > 2:
        leading = tuple(range(tensor.dim() - 2))
        low, high = tensor.amin(leading, keepdim=True), tensor.amax(leading, keepdim=True)
    for dim in (-2, -1):
        low = torch.cat([part.amin(dim, keepdim=True) for part in low.split(block, dim)], dim)
        high = torch.cat([part.amax(dim, keepdim=True) for part in high.split(block, dim)], dim)
    return low, high


# Operator -> sign for each operand: the result grows (1) or falls (-1) with it, after rounding too.
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
    """Bounds of what ``node`` makes of operands within theirs; None where nothing is known of numbers."""
    found = None if any(operand is None for operand in operands) else _known_bounds(node, operands)
    if found is not None and any(bound.isnan().any() for bound in found):
        found = None
    if found is None and node.dtype is torch.bool:
        unknown = torch.zeros((1,) * len(node.shape), dtype=torch.bool)
        return unknown, ~unknown
    return found


def _known_bounds(node: Pointwise, operands: list[Bounds]) -> Bounds | None:
    packet = getattr(node.target, "overloadpacket", None)
    bounds = node.args_with(operands)
    if packet in _COMPARISONS:
        return _monotone(node, _COMPARISONS[packet], bounds)
    if packet in _LOGICAL and all(low.dtype is torch.bool for low, _ in operands):
        return _monotone(node, _LOGICAL[packet], bounds)
    if packet in _ARITHMETIC and not node.kwargs:
        found = _monotone(node, _ARITHMETIC[packet], bounds)
        exact = _monotone(node, _ARITHMETIC[packet], [_as_double(bound) for bound in bounds])
        return found if _equal(found, exact) else None
    if packet is aten.to:
        (low, high), dtype = bounds
        found = low.to(dtype), high.to(dtype)
        return found if _equal(found, (low, high)) else None
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


def _equal(found: Bounds, exact: Bounds) -> bool:
    """Whether two computations agree, on finite numbers: then nothing between them overflows."""
    return all(
        bool((one.double() == other.double()).all() and other.isfinite().all())
        for one, other in zip(found, exact, strict=True)
    )
