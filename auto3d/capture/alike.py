"""Calls of operators that are alike: results of the same shapes at the same cost.

Layers repeat, so most calls of a model are like an earlier call, and what was found out about the earlier call holds
for them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from auto3d.capture.nodes import args_of

_SIMPLE = frozenset((int, bool, float, str, type(None), torch.dtype))


class DerivedCalls:
    """Adds calls to ``graph``, a program that is derived from a captured program. Of calls that are alike, one call
    runs."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._results: dict[Hashable, Any] = {}

    def add(self, name: str, target: Any, args: tuple, kwargs: dict, origin: fx.Node) -> fx.Node:
        """A node ``name`` that calls ``target``; where it is in the model's code is taken from ``origin``."""
        value = self.result(target, args, kwargs)
        node = self._graph.create_node("call_function", target, args, kwargs, name=name)
        if node.name != name:
            node.name = name
        node.meta.update(origin.meta, val=value)
        return node

    def take(self, name: str, made: fx.Node, origin: fx.Node) -> fx.Node:
        """A node ``name`` that takes the result of ``made`` which ``origin`` takes in the captured program."""
        node = self._graph.node_copy(origin, lambda _: made)
        node.name = name
        node.meta = {**origin.meta, "val": made.meta["val"][int(args_of(origin)[1])]}
        return node

    def result(self, target: Any, args: tuple, kwargs: dict) -> Any:
        """What ``target`` makes of meta tensors, the values of the nodes in its arguments, as autograd records it.

        An operator that writes to an argument runs each time.
        """
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            return _result(target, args, kwargs)
        key = signature(target, args, kwargs)
        if key not in self._results:
            self._results[key] = _result(target, args, kwargs)
        return self._results[key]


def _result(target: Any, args: tuple, kwargs: dict) -> Any:
    args, kwargs = values_in(args, kwargs)
    with torch.enable_grad():
        return target(*args, **kwargs)


def signature(target: Callable | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """All that results and cost of a call depend on. Tensors are given as such, or as the nodes whose values they are,
    and count by shape, strides, type and whether they require a gradient."""
    return target, described(args, _value), described(kwargs, _value)


def described(argument: Any, of_node: Callable[[fx.Node], Hashable]) -> Hashable:
    """Arguments of a call as something to compare: nodes as ``of_node`` says, and other tensors without elements."""
    kind = type(argument)
    if kind in _SIMPLE:  # most arguments
        return kind, argument
    if isinstance(argument, fx.Node):
        return fx.Node, of_node(argument)
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.requires_grad
    if isinstance(argument, list | tuple):
        return tuple([described(item, of_node) for item in argument])
    if isinstance(argument, dict):
        return tuple([(name, described(item, of_node)) for name, item in argument.items()])
    return kind, argument  # 1, 1.0 and True are equal, but give results of different types


def _value(node: fx.Node) -> Hashable:
    return described(node.meta["val"], _value)


def values_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple, dict]:
    """Arguments with the values of nodes in place of the nodes."""
    return fx.node.map_arg((tuple(args), dict(kwargs)), lambda node: node.meta["val"])
