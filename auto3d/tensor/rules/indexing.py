"""Rules of operators that look elements up by index."""

from collections.abc import Callable

import torch
from torch import fx

from auto3d.tensor.rules.call import Axis, Call, Rule


def _index(call: Call) -> Rule:
    """tensor[first, second, ...]: dimensions behind the indexed dimensions stay as they are."""
    indices = call.argument("indices")
    if not all(isinstance(index, fx.Node) and _is_integer(index) for index in indices):
        return Rule()
    looked_up = len(indices)
    behind = len(call.shapes[0]) - looked_up
    first = len(call.results[0]) - behind
    others = (None,) * (len(call.operands) - 1)
    axes = tuple(Axis((looked_up + dim, *others), (first + dim,)) for dim in range(behind))
    return Rule(axes=axes, linear=(frozenset({0}),))


def _is_integer(index: fx.Node) -> bool:
    """A mask indexes as many dimensions as it has, an integer index one dimension."""
    return index.meta["val"].dtype not in (torch.bool, torch.uint8)


def _index_select(call: Call) -> Rule:
    count = len(call.shapes[0])
    along = int(call.argument("dim")) % count
    axes = tuple(Axis((dim, None), (dim,)) for dim in range(count) if dim != along)
    return Rule(axes=axes, linear=(frozenset({0}),))


RULES: dict[str, Callable[[Call], Rule]] = {"index": _index, "index_select": _index_select}
