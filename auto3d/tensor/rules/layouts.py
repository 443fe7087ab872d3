"""Rules of operators that lay elements out anew: views, reorderings, pieces and joins."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch

from auto3d.tensor.rules.call import Axis, Call, Rule, Split, Way

aten = torch.ops.aten
_ALL = (frozenset({0}),)  # a partial operand gives a partial result


def reshaped(split: Split, shape: Sequence[int], target: Sequence[int]) -> Split | None:
    """The split of a tensor of ``shape`` after a reshape to ``target``; None if no dimension there is split like it."""
    for old, new in _groups(shape, target):
        if split.dim not in old:
            continue
        sizes = [shape[dim] for dim in old]
        place = old.index(split.dim)
        inner = prod(sizes[place + 1 :])
        flat = [block * inner for block in split.blocks] * prod(sizes[:place])
        return _unflattened(flat, [target[dim] for dim in new], new)
    return None


def _groups(shape: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dimensions of both shapes that hold the same elements, without dimensions of size 1.

    From [2, 6, 4] to [12, 2, 2]: dimensions 0 and 1 become dimension 0, and dimension 2 becomes dimensions 1 and 2.
    """
    left = [dim for dim, size in enumerate(shape) if size != 1]
    right = [dim for dim, size in enumerate(target) if size != 1]
    groups: list[tuple[list[int], list[int]]] = []
    old: list[int] = []
    new: list[int] = []
    while left or right:
        before, after = prod(shape[dim] for dim in old), prod(target[dim] for dim in new)
        if left and (not old or before < after or not right):
            old.append(left.pop(0))
        elif right:
            new.append(right.pop(0))
        if prod(shape[dim] for dim in old) == prod(target[dim] for dim in new):
            groups.append((old, new))
            old, new = [], []
    return groups


def _unflattened(flat: Sequence[int], sizes: Sequence[int], dims: Sequence[int]) -> Split | None:
    """The split of one of ``dims``, of ``sizes``, whose elements together are split in the blocks ``flat``.

    For sizes 3 and 4, blocks 4, 4, 4 split the second dimension in a block of 4. For sizes 2 and 4, a block of 8 splits
    the first dimension in a block of 2.
    """
    outer = 1
    for place, size in enumerate(sizes):
        inner = prod(sizes[place + 1 :])
        if len(flat) % outer == 0:
            per_outer = len(flat) // outer
            blocks = list(flat[:per_outer])
            # Padding is at the end of a block, so a block that has some must be all that varies there. A block of one
            # element cannot be split: [3 * h] in three blocks becomes [3, h] whose second dimension is split.
            if (
                list(flat) == blocks * outer
                and sum(blocks) == size * inner
                and all(block % inner == 0 and block > inner for block in blocks)
            ):
                return Split(dims[place], tuple(block // inner for block in blocks))
        outer *= size
    return None


def _reshape(call: Call) -> Rule:
    """The second operand of view_as and reshape_as only gives its shape."""
    shape, target = call.shapes[0], call.results[0]
    if call.argument("dtype") is not None:  # view.dtype reads the bytes of its operand anew
        return Rule()

    def carry(split: Split) -> tuple[Split, ...] | None:
        carried = reshaped(split, shape, target)
        return None if carried is None else (carried,)

    def carry_back(result: int, split: Split) -> Split | None:
        return reshaped(split, target, shape)

    def localise(call: Call, way: Way, shards: int) -> tuple[Any, tuple, dict]:
        local = list(way.gives[0].local_shape(target, shards))
        return aten.reshape.default, (call.operands[0], local), {}

    return Rule(linear=_ALL, carry=carry, carry_back=carry_back, localise=localise)


def _permuted(call: Call, order: Sequence[int]) -> Rule:
    """``order[i]`` is the operand's dimension that becomes dimension i of the result."""
    return Rule(axes=tuple(Axis((old,), (new,), padded=True) for new, old in enumerate(order)), linear=_ALL)


def _permute(call: Call) -> Rule:
    dims = call.argument("dims")
    return _permuted(call, [dim % len(dims) for dim in dims])


def _transpose(call: Call) -> Rule:
    """transpose, and swapaxes, whose arguments have other names."""
    order = list(range(len(call.shapes[0])))
    names = ("axis0", "axis1") if call.operator == "swapaxes" else ("dim0", "dim1")
    first, second = (int(call.argument(name)) for name in names)
    order[first], order[second] = order[second], order[first]
    return _permuted(call, order)


def _reversed(call: Call) -> Rule:
    return _permuted(call, list(range(len(call.shapes[0])))[::-1])


def _transposed_matrix(call: Call) -> Rule:
    *leading, rows, columns = range(len(call.shapes[0]))
    return _permuted(call, [*leading, columns, rows])


def _without_ones(call: Call) -> Rule:
    """Operators that only add or remove dimensions of size 1."""
    old = [dim for dim, size in enumerate(call.shapes[0]) if size != 1]
    new = [dim for dim, size in enumerate(call.results[0]) if size != 1]
    return Rule(axes=tuple(Axis((a,), (b,), padded=True) for a, b in zip(old, new, strict=True)), linear=_ALL)


def _expand(call: Call) -> Rule:
    """The second operand of expand_as only gives its shape."""
    shape, target = call.shapes[0], call.results[0]
    shift = len(target) - len(shape)
    kept = [dim for dim, size in enumerate(shape) if size == target[dim + shift] > 1]
    axes = tuple(Axis((dim, dim + shift)[: len(call.operands)], (dim + shift,)) for dim in kept)

    def localise(call: Call, way: Way, shards: int) -> tuple[Any, tuple, dict]:
        return aten.expand.default, (call.operands[0], list(way.gives[0].local_shape(target, shards))), {}

    return Rule(axes=axes, linear=_ALL if len(call.operands) == 1 else (), localise=localise)


def _repeat(call: Call) -> Rule:
    shape, target = call.shapes[0], call.results[0]
    shift = len(target) - len(shape)
    axes = tuple(Axis((dim,), (dim + shift,)) for dim, size in enumerate(shape) if size == target[dim + shift] > 1)
    return Rule(axes=axes, linear=_ALL)


def _repeat_interleave(call: Call) -> Rule:
    """Every element is repeated next to itself, so a block stays a block, only longer."""
    if len(call.operands) != 1 or call.argument("dim") is None:
        return Rule()
    dims = range(len(call.shapes[0]))
    fixed = call.argument("dim") % len(dims) if call.argument("output_size") is not None else None
    return Rule(axes=tuple(Axis((dim,), (dim,)) for dim in dims if dim != fixed), linear=_ALL)


def _moved_along(call: Call, dims: Sequence[int]) -> Rule:
    """Operators that move elements along ``dims`` only."""
    count = len(call.shapes[0])
    moved = {dim % count for dim in dims}
    return Rule(axes=tuple(Axis((dim,), (dim,)) for dim in range(count) if dim not in moved), linear=_ALL)


def _roll(call: Call) -> Rule:
    return _moved_along(call, call.argument("dims") or range(len(call.shapes[0])))


def _pad(call: Call) -> Rule:
    """Padding by zeros keeps a partial value partial; other padding does not."""
    pads = call.argument("pad")
    count = len(call.shapes[0])
    padded = {count - 1 - number // 2 for number, size in enumerate(pads) if size}
    rule = _moved_along(call, sorted(padded))
    zeros = call.argument("mode", "constant") == "constant" and not call.argument("value", 0)
    return Rule(axes=rule.axes, linear=_ALL if zeros else ())


def _select(call: Call) -> Rule:
    count = len(call.shapes[0])
    along = int(call.argument("dim")) % count
    axes = tuple(Axis((dim,), (dim - (dim > along),)) for dim in range(count) if dim != along)
    return Rule(axes=axes, linear=_ALL)


def _unbind(call: Call) -> Rule:
    count, results = len(call.shapes[0]), len(call.results)
    along = int(call.argument("dim", 0)) % count
    axes = tuple(Axis((dim,), (dim - (dim > along),) * results) for dim in range(count) if dim != along)
    return Rule(axes=axes, linear=_ALL)


def _stack(call: Call) -> Rule:
    count, operands = len(call.shapes[0]), len(call.operands)
    along = int(call.argument("dim", 0)) % (count + 1)
    axes = tuple(Axis((dim,) * operands, (dim + (dim >= along),)) for dim in range(count))
    return Rule(axes=axes, linear=(frozenset(range(operands)),))


def _cat(call: Call) -> Rule:
    count, operands = len(call.results[0]), len(call.operands)
    if any(len(shape) != count for shape in call.shapes):  # torch ignores empty tensors of one dimension
        return Rule()
    along = int(call.argument("dim", 0)) % count
    axes = tuple(Axis((dim,) * operands, (dim,)) for dim in range(count) if dim != along)
    return Rule(axes=axes, linear=(frozenset(range(operands)),), joins=along)


def _pieces(call: Call) -> Rule:
    """split, split_with_sizes and chunk: consecutive pieces along one dimension."""
    count = len(call.shapes[0])
    along = int(call.argument("dim", 0)) % count
    sizes = [shape[along] for shape in call.results]
    others = tuple(Axis((dim,), (dim,) * len(sizes)) for dim in range(count) if dim != along)
    ends = list(accumulate(sizes, initial=0))

    def carry(split: Split) -> tuple[Split, ...] | None:
        if split.dim != along:
            return None
        pieces = [blocks_between(split, first, last) for first, last in pairwise(ends)]
        return None if None in pieces else tuple(Split(along, piece) for piece in pieces if piece is not None)

    def carry_back(result: int, split: Split) -> Split | None:
        if split.dim != along:
            return None
        blocks: list[tuple[int, ...]] = [(size,) for size in sizes]
        blocks[result] = split.blocks
        return Split(along, tuple(block for piece in blocks for block in piece))

    def localise(call: Call, way: Way, shards: int) -> tuple[Any, tuple, dict]:
        if way.needs[0].split is None or way.needs[0].split.dim != along:
            return call.node.target, call.node.args, call.node.kwargs
        local = [gives.local_shape(shape, shards)[along] for gives, shape in zip(way.gives, call.results, strict=True)]
        return aten.split_with_sizes.default, (call.operands[0], local, along), {}

    return Rule(axes=others, linear=_ALL, carry=carry, carry_back=carry_back, localise=localise)


def blocks_between(split: Split, first: int, last: int) -> tuple[int, ...] | None:
    """The blocks of the elements ``[first, last)``; None if these are not whole blocks."""
    start, inside = 0, []
    for block in split.blocks:
        if first <= start and start + block <= last:
            inside.append(block)
        elif start < last and first < start + block:
            return None
        start += block
    return tuple(inside)


def _slice(call: Call) -> Rule:
    """Elements from start to end of one dimension, or some of them."""
    count = len(call.shapes[0])
    along = int(call.argument("dim", 0)) % count
    size = call.shapes[0][along]
    if len(call.operands) > 1:  # narrow from where a tensor says
        return Rule()
    if call.operator == "narrow":
        start, step = int(call.argument("start")) % max(1, size), 1
        end = start + int(call.argument("length"))
    else:
        start, end, step = slice(call.argument("start"), call.argument("end"), call.argument("step", 1)).indices(size)
    others = tuple(Axis((dim,), (dim,), padded=True) for dim in range(count) if dim != along)
    whole = (start, end, step) == (0, size, 1)

    def carry(split: Split) -> tuple[Split, ...] | None:
        if split.dim != along or step != 1:
            return None
        blocks = split.blocks if whole else blocks_between(split, start, end)
        return None if not blocks else (Split(along, blocks),)

    def carry_back(result: int, split: Split) -> Split | None:
        if split.dim != along or step != 1:
            return None
        around = [*([start] if start else []), *split.blocks, *([size - end] if end < size else [])]
        return Split(along, tuple(around))

    def localise(call: Call, way: Way, shards: int) -> tuple[Any, tuple, dict]:
        split = way.needs[0].split
        if split is None or split.dim != along:
            return call.node.target, call.node.args, call.node.kwargs
        before = blocks_between(split, 0, start) or ()
        first = sum(Split(along, before).local_blocks(shards))
        length = way.gives[0].local_shape(call.results[0], shards)[along]
        return aten.slice.Tensor, (call.operands[0], along, first, first + length), {}

    return Rule(axes=others, linear=_ALL, carry=carry, carry_back=carry_back, localise=localise)


def _slice_scatter(call: Call) -> Rule:
    """A tensor in which the elements of a slice along one dimension are replaced by another tensor's."""
    count = len(call.shapes[0])
    along = int(call.argument("dim", 0)) % count
    axes = tuple(Axis((dim, dim), (dim,)) for dim in range(count) if dim != along)
    return Rule(axes=axes, linear=(frozenset({0, 1}),))


def _select_scatter(call: Call) -> Rule:
    """The same for one element of a dimension, which the other tensor does not have."""
    count = len(call.shapes[0])
    along = int(call.argument("dim")) % count
    axes = tuple(Axis((dim, dim - (dim > along)), (dim,)) for dim in range(count) if dim != along)
    return Rule(axes=axes, linear=(frozenset({0, 1}),))


RULES: dict[str, Callable[[Call], Rule]] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"), _reshape),
    "permute": _permute,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    **dict.fromkeys(("t", "numpy_T"), _reversed),
    "mT": _transposed_matrix,
    **dict.fromkeys(("unsqueeze", "squeeze"), _without_ones),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "roll": _roll,
    "flip": lambda call: _moved_along(call, call.argument("dims")),
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    "select": _select,
    "unbind": _unbind,
    "stack": _stack,
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _pieces),
    **dict.fromkeys(("slice", "narrow"), _slice),
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
}
