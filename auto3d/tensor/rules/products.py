"""Rules of matrix products, convolutions and lookups in tables: column-parallel, row-parallel and by samples."""

from collections.abc import Callable
from typing import Any

from auto3d.tensor.collectives import VOCABULARY_EMBEDDING
from auto3d.tensor.rules.call import PARTIAL, WHOLE, Axis, Call, Rule, Split, TensorPlacement, Way
from auto3d.tensor_placement import PlacementKind

_BIAS = frozenset({2})


def _linear(call: Call) -> Rule:
    """value [..., in], weight [out, in], bias [out]. A weight [in] gives one output, without a dimension."""
    last = len(call.shapes[0]) - 1
    if len(call.shapes[1]) == 1:
        return _matmul(call) if len(call.operands) == 2 else Rule()
    bias: tuple[int | None, ...] = (0,) if len(call.operands) == 3 else ()
    none: tuple[None, ...] = (None,) if bias else ()
    axes = [Axis((dim, None, *none), (dim,)) for dim in range(last)]
    axes.append(Axis((None, 0, *bias), (last,), padded=True))
    axes.append(Axis((last, 1, *none), (None,), added=_BIAS if bias else frozenset()))
    return Rule(axes=tuple(axes), product=True)


def _addmm(call: Call) -> Rule:
    """bias [out] or [rows, out], value [rows, in], weight [in, out]."""
    full = len(call.shapes[0]) == 2 and call.shapes[0][0] > 1
    axes = (
        Axis((0 if full else None, 0, None), (0,)),
        Axis((len(call.shapes[0]) - 1, None, 1), (1,), padded=True),
        Axis((None, 1, 0), (None,), added=frozenset({0})),
    )
    return Rule(axes=axes, product=True)


def _matmul(call: Call) -> Rule:
    """[..., m, k] × [..., k, n]; leading dimensions are broadcast, and a vector has no m or no n."""
    return Rule(axes=tuple(_matmul_axes(call.shapes[0], call.shapes[1], call.results[0])), product=True)


def _matmul_axes(left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]) -> list[Axis]:
    rows, columns = len(left) > 1, len(right) > 1
    batch = len(result) - rows - columns
    axes = []
    for dim in range(batch):
        places = [dim - batch + len(shape) - 2 for shape in (left, right)]
        has = [
            p if p >= 0 and shape[p] == result[dim] else None for p, shape in zip(places, (left, right), strict=True)
        ]
        if result[dim] > 1 and any(place is not None for place in has):
            axes.append(Axis(tuple(has), (dim,)))
    if rows:
        axes.append(Axis((len(left) - 2, None), (batch,)))
    if columns:
        axes.append(Axis((None, len(right) - 1), (len(result) - 1,), padded=True))
    axes.append(Axis((len(left) - 1, len(right) - 2 if columns else 0), (None,)))
    return axes


def _baddbmm(call: Call) -> Rule:
    """added (broadcast to [b, m, n]) + [b, m, k] × [b, k, n]."""
    added, result = call.shapes[0], call.results[0]
    axes = []
    for axis in _matmul_axes(call.shapes[1], call.shapes[2], result):
        dim = axis.results[0]
        if dim is None:
            axes.append(Axis((None, *axis.operands), (None,), added=frozenset({0})))
            continue
        place = dim - len(result) + len(added)
        has = place if place >= 0 and added[place] == result[dim] else None
        axes.append(Axis((has, *axis.operands), axis.results))
    return Rule(axes=tuple(axes), product=True)


def _grouped_product(call: Call) -> Rule:
    """rows [rows, in] that are sorted by expert, weights [experts, in, out], end of each expert's rows [experts]."""
    if [len(shape) for shape in call.shapes] != [2, 3, 1]:
        return Rule()
    aligned = 8 if call.operator == "_grouped_mm" else 1  # its kernels take rows of whole 16 bytes
    columns, inner = Axis((None, 2, None), (1,), together=aligned), Axis((1, 1, None), (None,), together=aligned)
    return Rule(axes=(columns, inner), product=True)


def _convolution(call: Call) -> Rule:
    """value [batch, in, ...], weight [out, in / groups, ...] or, transposed, [in, out / groups, ...], bias [out]."""
    value, weight = call.shapes[:2]
    if len(value) != len(weight):  # no dimension of samples
        return Rule()
    bias: tuple[int | None, ...] = (0,) if len(call.operands) == 3 else ()
    none: tuple[None, ...] = (None,) if bias else ()
    transposed = bool(call.argument("transposed", False)) or "transpose" in call.operator
    groups = int(call.argument("groups", 1))
    axes = [Axis((0, None, *none), (0,))]
    if groups > 1:
        if not transposed:
            axes.append(Axis((1, 0, *bias), (1,), together=value[1] // groups))
    else:
        of_out, of_in = (1, 0) if transposed else (0, 1)
        axes.append(Axis((None, of_out, *bias), (1,)))
        axes.append(Axis((1, of_in, *none), (None,), added=_BIAS if bias else frozenset()))

    def localise(call: Call, way: Way, shards: int) -> tuple[Any, tuple, dict]:
        args, kwargs = list(call.node.args), dict(call.node.kwargs)
        if way.needs[0].kind is PlacementKind.SPLIT and way.needs[1].kind is PlacementKind.SPLIT and groups > 1:
            names = [argument.name for argument in call.node.target._schema.arguments]  # type: ignore[union-attr]
            if "groups" in kwargs:
                kwargs["groups"] = groups // shards
            else:
                args[names.index("groups")] = groups // shards
        return call.node.target, tuple(args), kwargs

    return Rule(axes=tuple(axes), product=True, localise=localise if groups > 1 else None)


def _embedding(call: Call) -> Rule:
    """weight [rows, width], indices of any shape; rows that are split give a partial result.

    A gradient that is scaled by how often an index occurs needs all indices.
    """
    weight, indices = call.shapes
    axes = [Axis((1, None), (len(indices),))]
    if not call.argument("scale_grad_by_freq", False):
        axes += [Axis((None, dim), (dim,)) for dim in range(len(indices)) if indices[dim] > 1]
    rows = TensorPlacement(PlacementKind.SPLIT, Split(0, (weight[0],)))
    by_rows = Way((rows, WHOLE), (PARTIAL,))
    padding_idx = int(call.argument("padding_idx", -1))
    plain = not call.argument("scale_grad_by_freq", False) and not call.argument("sparse", False)

    def localise(call: Call, way: Way, shards: int) -> tuple[Any, tuple, dict]:
        if way != by_rows:
            return call.node.target, call.node.args, call.node.kwargs
        return VOCABULARY_EMBEDDING, (*call.operands, padding_idx, weight[0], shards), {}

    return Rule(axes=tuple(axes), special=(by_rows,) if plain else (), localise=localise, product=True)


RULES: dict[str, Callable[[Call], Rule]] = {
    "linear": _linear,
    "addmm": _addmm,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), _matmul),
    "baddbmm": _baddbmm,
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), _grouped_product),  # the second is transformers' own
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        _convolution,
    ),
    "embedding": _embedding,
}
