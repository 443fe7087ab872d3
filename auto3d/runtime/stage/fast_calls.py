"""The program of a segment with the calls that take a host the least time, and equal numbers.

torch.ops parses arguments by the schema of an operator; torch's functions and methods, which call the same operator, do
that in half the time. The difference, 1 µs a call, is a tenth of the host time of a GPT layer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_nn = torch._C._nn

FUNCTIONS: dict[Any, Callable] = {  # operator -> function that takes the same arguments and calls it
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.neg.default: torch.neg,
    aten.exp.default: torch.exp,
    aten.rsqrt.default: torch.rsqrt,
    aten.cos.default: torch.cos,
    aten.sin.default: torch.sin,
    aten.tanh.default: torch.tanh,
    aten.sigmoid.default: torch.sigmoid,
    aten.relu.default: torch.relu,
    aten.silu.default: _nn.silu,
    aten.gelu.default: _nn.gelu,
    aten.mean.dim: torch.mean,
    aten.softmax.int: torch.softmax,
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
    aten.matmul.default: torch.matmul,
    aten.linear.default: _nn.linear,
    aten.conv2d.default: torch.conv2d,
    aten.batch_norm.default: torch.batch_norm,
    aten.layer_norm.default: torch.layer_norm,
    aten.embedding.default: torch.embedding,
    aten.cat.default: torch.cat,
    aten.scaled_dot_product_attention.default: _nn.scaled_dot_product_attention,
}
METHODS: dict[Any, str] = {  # operator -> method of its first argument that takes the others
    aten.view.default: "view",
    aten.reshape.default: "reshape",
    aten.permute.default: "permute",
    aten.transpose.int: "transpose",
    aten.unsqueeze.default: "unsqueeze",
    aten.contiguous.default: "contiguous",
    aten.to.dtype: "to",
}
SIZES = (aten.view.default, aten.reshape.default, aten.permute.default)  # the methods take the list as arguments
_CAST = aten._to_copy.default
_BY_POSITION = {aten.to.dtype: 4}  # arguments that the method takes by position, where the operator takes more


def use_fast_calls(module: fx.GraphModule) -> fx.GraphModule:
    """``module`` without dropout that drops nothing, and with the fastest calls of its other operators."""
    for node in list(module.graph.nodes):
        if node.op == "call_module":  # its call would look for hooks, which it has none of
            node.op, node.target = "call_function", module.get_submodule(node.target).forward
        if node.op != "call_function":
            continue
        if drops_nothing(node):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]
        elif node.target in METHODS:
            spread, number = node.target in SIZES, _BY_POSITION.get(node.target, len(node.args))
            names = [argument.name for argument in node.target._schema.arguments[number:]]
            node.kwargs = {**node.kwargs, **dict(zip(names, node.args[number:], strict=False))}
            node.op, node.target, (value, *others) = "call_method", METHODS[node.target], node.args[:number]
            # Methods have no call without sizes: the sizes of a number, an empty list, stay a list.
            node.args = (value, *others[0]) if spread and others[0] else (value, *others)
        elif node.target is _CAST and node.kwargs.keys() == {"dtype"} and _changes_type(node):
            node.op, node.target = "call_method", "to"
            node.args, node.kwargs = (node.args[0], node.kwargs["dtype"]), {}
    module.recompile()
    return module


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without what that does for functorch, which takes as long as the rest."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]  # torch's method in C


def drops_nothing(node: fx.Node) -> bool:
    """Whether ``node`` is a dropout that returns its argument."""
    return node.target is aten.dropout.default and bool(node.args[1] == 0 or not node.args[2])


def _changes_type(node: fx.Node) -> bool:
    source = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    return isinstance(source, torch.Tensor) and source.dtype != node.kwargs["dtype"]
