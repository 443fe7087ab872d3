"""Values that do not depend on data, computed on the CPU with neither a batch nor a matrix of positions in memory.

A value is compact, as in auto3d.capture.pointwise: a value that is expanded over samples is held for one sample. A
value that still has more than MOST_HELD elements, such as a comparison of all positions with all others, is held as an
expression.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from auto3d.capture.nodes import args_of, target_of
from auto3d.capture.pointwise import Expression, Pointwise, UndecidedError, aten, elements, restructured

MOST_HELD = 2**20  # elements of one value
_CPU = torch.device("cpu")

Change = Callable[[torch.Tensor], torch.Tensor]


def value_of(nodes: Sequence[fx.Node]) -> Expression:
    """The compact value of the last of ``nodes``, which makes a tensor. Each node comes after all nodes that it uses.

    Raises UndecidedError where an operator without a rule meets more than MOST_HELD elements.
    """
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        values[node] = _value(node, values)
    return values[nodes[-1]]


def _value(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    target = target_of(node)
    packet = getattr(target, "overloadpacket", None)
    if not all(isinstance(size, int) for tensor in _tensors(node) for size in tensor.shape):
        raise UndecidedError  # a size depends on data
    result = None
    if isinstance(node.meta["val"], torch.Tensor) and 0 not in _shape(node):
        rule = _pointwise if torch.Tag.pointwise in getattr(target, "tags", ()) else _RULES.get(packet)
        result = rule and rule(node, values)
    if result is None:
        return _whole(node, values)
    small = isinstance(result, Pointwise) and prod(result.shape) <= MOST_HELD
    return elements(result) if small else result


def _whole(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Run the operator on its full arguments, expanded over samples."""
    involved = [node, *node.all_input_nodes]
    if any(prod(tensor.shape) > MOST_HELD for other in involved for tensor in _tensors(other)):
        raise UndecidedError
    full = {
        used: elements(values[used]).expand(_shape(used)) if isinstance(values[used], Expression) else values[used]
        for used in node.all_input_nodes
    }
    args, kwargs = _arguments(node, full)
    return target_of(node)(*args, **kwargs)


def _arguments(node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[tuple, dict]:
    """The arguments of ``node``: ``values`` in place of nodes, and the CPU in place of the exported device."""
    return tree_map_only(torch.device, lambda _: _CPU, fx.map_arg((node.args, node.kwargs), values.__getitem__))


def _pointwise(node: fx.Node, values: Mapping[fx.Node, Any]) -> Expression | None:
    used = [argument for argument in args_of(node) if isinstance(argument, fx.Node)]
    if len(used) < sum(isinstance(leaf, fx.Node) for leaf in tree_leaves((node.args, node.kwargs))):
        return None  # lists of tensors are among the arguments
    if not all(isinstance(values[other], Expression) for other in used):
        return None
    if not used or torch.broadcast_shapes(*map(_shape, used)) != _shape(node):
        return None
    aligned = {other: _expanded(values[other], len(_shape(node))) for other in used}
    args, kwargs = _arguments(node, aligned)
    return Pointwise(target_of(node), args, kwargs, node.meta["val"].dtype)


def _copy(node: fx.Node, values: Mapping[fx.Node, Any]) -> Expression:
    value, dtype = values[args_of(node)[0]], node.meta["val"].dtype
    return value if value.dtype is dtype else Pointwise(aten.to.dtype, (value, dtype), {}, dtype)


def _fill(node: fx.Node, values: Mapping[fx.Node, Any], value: Any = None, argument: int = 0) -> Expression | None:
    value = args_of(node)[argument] if value is None else value
    if isinstance(value, fx.Node):
        return None
    return torch.full((1,) * len(_shape(node)), value, dtype=node.meta["val"].dtype)


def _triangle(node: fx.Node, values: Mapping[fx.Node, Any], compare: Any) -> Expression:
    """The elements where ``compare(column, row + diagonal)`` holds, and zeros elsewhere."""
    value, shape = values[args_of(node)[0]], _shape(node)
    rows, columns = positions(shape)
    diagonal = args_of(node)[1] if len(args_of(node)) > 1 else 0
    kept = Pointwise(compare, (columns, rows + diagonal), {}, torch.bool)
    return Pointwise(aten.where.self, (kept, value, torch.zeros((1,) * len(shape), dtype=value.dtype)), {}, value.dtype)


def positions(shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(row numbers, column numbers) of a tensor of that shape, compact."""
    leading = (1,) * (len(shape) - 2)
    return torch.arange(shape[-2]).view(*leading, -1, 1), torch.arange(shape[-1]).view(*leading, 1, -1)


def _index(node: fx.Node, values: Mapping[fx.Node, Any]) -> Expression | None:
    """Indexing as an elementwise operator: possible with one integer index per dimension of a tensor that is held."""
    source, indices = args_of(node)
    held, rank = values[source], len(_shape(node))
    if not isinstance(held, torch.Tensor) or len(indices) != held.dim():
        return None
    if not all(isinstance(index, fx.Node) and isinstance(values[index], Expression) for index in indices):
        return None
    if any(values[index].dtype in (torch.bool, torch.uint8) for index in indices):
        return None
    first = torch.zeros((1,) * rank, dtype=torch.int64)  # any index is right along a dimension in which elements repeat
    chosen = [
        first if size == 1 else _expanded(values[index], rank) for size, index in zip(held.shape, indices, strict=True)
    ]
    return Pointwise(partial(_take, held), tuple(chosen), {}, held.dtype)


def _take(held: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
    return held[indices]


def _along(node: fx.Node, values: Mapping[fx.Node, Any], argument: int, default: int | None = None) -> Any:
    """An operator that treats all lines along one dimension alike: only that dimension must be expanded."""
    used, rank = node.all_input_nodes, len(_shape(node))
    dim: Any = args_of(node)[argument] if len(args_of(node)) > argument else default
    if not rank or not all(isinstance(values[other], torch.Tensor) and values[other].dim() == rank for other in used):
        return None
    dim %= rank
    lines = torch.broadcast_shapes(*(_with(values[other].shape, dim, 1) for other in used))
    whole = {other: values[other].expand(_with(lines, dim, _shape(other)[dim])) for other in used}
    if prod(_with(lines, dim, _shape(node)[dim])) > MOST_HELD:
        return None
    args, kwargs = _arguments(node, whole)
    return target_of(node)(*args, **kwargs)


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _moved(node: fx.Node, values: Mapping[fx.Node, Any], change_of: Callable[[fx.Node], Change | None]) -> Any:
    value, change = values[args_of(node)[0]], change_of(node)
    if change is None or not isinstance(value, Expression) or value.dtype is not node.meta["val"].dtype:
        return None  # a changed dtype is a view of the bits as another type
    if not len(value.shape):
        assert isinstance(value, torch.Tensor)  # an expression of few elements is evaluated at once
        return value.reshape((1,) * len(_shape(node)))
    return restructured(value, change)


def _expand(node: fx.Node) -> Change:
    return partial(_expanded_tensor, rank=len(_shape(node)))


def _expanded(value: Expression, rank: int) -> Expression:
    return value if len(value.shape) == rank else restructured(value, partial(_expanded_tensor, rank=rank))


def _expanded_tensor(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.reshape((1,) * (rank - tensor.dim()) + tensor.shape) if tensor.dim() else tensor


def _reshape(node: fx.Node) -> Change | None:
    """The change of a reshape that only adds or drops dimensions of size 1; None for another reshape."""
    before, after = _shape(args_of(node)[0]), _shape(node)
    if [size for size in before if size != 1] != [size for size in after if size != 1]:
        return None

    def change(tensor: torch.Tensor) -> torch.Tensor:
        kept = iter(size for size, whole in zip(tensor.shape, before, strict=True) if whole != 1)
        return tensor.reshape([1 if whole == 1 else next(kept) for whole in after])

    return change


def _permute(node: fx.Node) -> Change:
    return lambda tensor: target_of(node)(tensor, *args_of(node)[1:])


def _slice(node: fx.Node) -> Change:
    dim = args_of(node)[1] if len(args_of(node)) > 1 else 0
    return lambda tensor: tensor if tensor.shape[dim] == 1 else target_of(node)(tensor, *args_of(node)[1:])


def _select(node: fx.Node) -> Change:
    _, dim, index = args_of(node)
    return lambda tensor: tensor.select(dim, 0 if tensor.shape[dim] == 1 else index)


def _repeat(node: fx.Node) -> Change:
    repeats = args_of(node)[1]

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = _expanded_tensor(tensor, len(repeats))
        return tensor.repeat([1 if size == 1 else times for size, times in zip(tensor.shape, repeats, strict=True)])

    return change


def _shape(node: fx.Node) -> torch.Size:
    """The shape in the program, expanded."""
    return node.meta["val"].shape


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, torch.Tensor)]


_RULES: dict[Any, Callable[[fx.Node, Mapping[fx.Node, Any]], Any]] = {
    **dict.fromkeys((aten.to, aten._to_copy, aten.type_as), _copy),
    **dict.fromkeys((aten.contiguous, aten.detach, aten.alias, aten.lift_fresh, aten.lift_fresh_copy), _copy),
    **dict.fromkeys((aten.__and__, aten.__or__, aten.where, aten.floor_divide, aten.fill), _pointwise),
    **dict.fromkeys((aten.ones, aten.new_ones, aten.ones_like), partial(_fill, value=1)),
    **dict.fromkeys((aten.zeros, aten.new_zeros, aten.zeros_like), partial(_fill, value=0)),
    **dict.fromkeys((aten.full, aten.full_like), partial(_fill, argument=1)),
    aten.new_full: partial(_fill, argument=2),
    aten.tril: partial(_triangle, compare=aten.le.Tensor),
    aten.triu: partial(_triangle, compare=aten.ge.Tensor),
    aten.index: _index,
    aten.cumsum: partial(_along, argument=1),
    aten.cat: partial(_along, argument=1, default=0),
    aten.diff: partial(_along, argument=2, default=-1),
    **dict.fromkeys((aten.expand, aten.expand_as, aten.broadcast_to), partial(_moved, change_of=_expand)),
    **dict.fromkeys(
        (aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.flatten, aten.unflatten),
        partial(_moved, change_of=_reshape),
    ),
    **dict.fromkeys((aten.permute, aten.transpose, aten.t, aten.mT, aten.flip), partial(_moved, change_of=_permute)),
    aten.slice: partial(_moved, change_of=_slice),
    aten.select: partial(_moved, change_of=_select),
    aten.repeat: partial(_moved, change_of=_repeat),
}
