"""Access to the arguments and the target of a torch.fx node without torch's types.

torch.fx declares both as a union of every type that may occur. Which type a node has follows from its operator, which a
type checker cannot see, so the callers here know better.
"""

from typing import Any

import torch
from torch import fx


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of ``node``: other nodes, numbers, and lists of these."""
    return node.args


def kwargs_of(node: fx.Node) -> dict[str, Any]:
    """The keyword arguments of ``node``."""
    return node.kwargs


def target_of(node: fx.Node) -> Any:
    """What ``node`` calls: an operator, or a function of torch or Python. For an attribute, its name."""
    return node.target


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments of ``node`` in order, each as often as it occurs."""
    operands: list[fx.Node] = []

    def add(argument: Any) -> None:
        if isinstance(argument, fx.Node):
            operands.append(argument)
        elif isinstance(argument, list | tuple):
            for item in argument:
                add(item)

    add(node.args)
    add(tuple(node.kwargs.values()))
    return operands


def is_tensor(node: fx.Node) -> bool:
    """Whether the value of ``node`` is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)
