"""The power of a number in what a function makes of it, which its operations say."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

_SAME = frozenset(  # their result has the degree of their first operand
    {"neg", "sum", "mean", "_to_copy", "view", "_unsafe_view", "reshape", "clone", "alias", "detach", "expand"}
    | {"unsqueeze", "squeeze", "permute", "t", "transpose", "select", "slice", "index", "lift_fresh_copy", "unbind"}
)
_ADD = frozenset({"add", "sub", "rsub"})


def degree_in(function: Callable[..., torch.Tensor], number: torch.Tensor, *others: torch.Tensor) -> int | None:
    """k, where ``function`` of ``number`` and ``others`` is what it makes of the others times the k-th power; or None.

    ``number`` is a whole number from 1. Errors are the function's, which must not read the value of ``number``.
    """
    graph = make_fx(functionalize(function))(number, *others).graph
    degrees: dict[fx.Node, int | None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            degrees[node] = 0 if degrees else 1  # the first is the number
        elif node.op == "get_attr":
            degrees[node] = 0
        elif node.op == "call_function":
            degrees[node] = _degree(node, degrees)
        else:
            (result,) = node.all_input_nodes
            return degrees[result]
    return None


def _degree(node: fx.Node, degrees: dict[fx.Node, int | None]) -> int | None:
    operands = [degrees[operand] for operand in node.all_input_nodes]
    if not any(operands) and None not in operands:  # all are 0
        return 0
    name = node.target._schema.name.removeprefix("aten::") if isinstance(node.target, torch._ops.OpOverload) else ""
    first, second = (_of(argument, degrees) for argument in (*node.args, 0)[:2])
    if None in operands:
        return None
    assert first is not None
    if name in _SAME:
        return first if _keeps(node) else None
    if name in ("mul", "div") and len(node.args) == 2 and second is not None and not node.kwargs:
        return first + second if name == "mul" else first - second
    if name == "reciprocal":
        return -first
    if name in _ADD:
        return _common([term for term in node.args[:2] if isinstance(term, fx.Node) or term != 0], degrees)
    if name in ("stack", "cat"):
        return _common(list(node.args[0]), degrees)  # type: ignore[arg-type]
    if name == "masked_fill" and node.args[2] == 0 and not degrees[node.args[1]]:  # type: ignore[index]
        return first
    if name in ("clamp", "clamp_min") and first == 1 and _is_at_most_one(node):
        return 1
    return None


def _of(argument: Any, degrees: dict[fx.Node, int | None]) -> int | None:
    return degrees[argument] if isinstance(argument, fx.Node) else 0


def _common(arguments: list[Any], degrees: dict[fx.Node, int | None]) -> int | None:
    common = {_of(argument, degrees) for argument in arguments}
    return common.pop() if len(common) == 1 else None


def _keeps(node: fx.Node) -> bool:
    """Whether ``node`` rounds nothing to whole numbers."""
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    values = value if isinstance(value, list | tuple) else [value]
    return not source.is_floating_point() or all(entry.is_floating_point() for entry in values)


def _is_at_most_one(node: fx.Node) -> bool:
    """Whether a clamp leaves numbers from 1 as they are."""
    least, most = (*node.args[1:3], None, None)[:2]
    least, most = node.kwargs.get("min", least), node.kwargs.get("max", most)
    return most is None and isinstance(least, int | float) and least <= 1
