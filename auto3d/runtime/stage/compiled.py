"""A segment's program compiled by torch.compile, in pieces around the operations that must run as they are.

A random operator seeds its generator first, a collective waits for other ranks, a split backward leaves work for later,
and a user's autograd Function may run any code: these stay between pieces that inductor compiles. Pieces have static
shapes, so none is compiled again after the warm-up. Equal pieces, such as a model's blocks, share their code.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from auto3d.runtime.weights.low_precision import UseOfCopy


def compiled(module: fx.GraphModule) -> fx.GraphModule:
    """``module`` with its operators compiled, wherever several of them follow each other."""
    # One process per rank already uses the cores, so inductor's own worker processes would only compete.
    torch._inductor.config.compile_threads = 1
    _uses_of_copies_first(module)
    piece_of: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        if node.op in ("call_function", "call_module"):
            last = next(reversed(piece_of), None)
            begins = last is None or _runs_as_it_is(node) or _runs_as_it_is(last)
            piece_of[node] = len(piece_of) if begins or last is None else piece_of[last]
    if not piece_of:
        return module
    whole = split_module(module, module, lambda node: piece_of[node], keep_original_order=True)
    as_they_are = {f"submod_{piece}" for node, piece in piece_of.items() if _runs_as_it_is(node)}
    for name, piece in list(whole.named_children()):
        if name.startswith("submod_") and name not in as_they_are:
            assert isinstance(piece, fx.GraphModule)
            setattr(whole, name, _Compiled(piece))
    return whole


@dataclass(frozen=True)
class _Kind:
    """A ``piece``; pieces of equal ``text`` compute the same of inputs of the same sizes and layouts."""

    text: str
    piece: fx.GraphModule = field(compare=False)


@cache
def _code_of(kind: _Kind) -> Callable[..., Any]:
    """The compiled code of a kind of pieces, for all stages of this process."""
    return torch.compile(kind.piece, fullgraph=True, dynamic=False)


def _text(piece: fx.GraphModule) -> str:
    """What ``piece`` computes, without names."""
    numbers = {node: f"value {number}" for number, node in enumerate(piece.graph.nodes)}
    lines = []
    for node in piece.graph.nodes:
        if node.op == "get_attr" or (node.op == "placeholder" and "val" not in node.meta):
            return f"piece {id(piece)}"  # alone of its kind
        args, kwargs = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
        what = node.target if node.op == "call_function" else [_described(node.meta.get("val"))]
        lines.append(f"{node.op} {what} {args} {kwargs}")
    return "\n".join(lines)


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, tuple(value.shape), value.stride(), value.requires_grad


class _Compiled(nn.Module):
    def __init__(self, piece: fx.GraphModule) -> None:
        super().__init__()
        self._run = _code_of(_Kind(_text(piece), piece))

    def forward(self, *args: Any) -> Any:
        return self._run(*args)


def _runs_as_it_is(node: fx.Node) -> bool:
    return node.op == "call_module" or not isinstance(node.target, torch._ops.OpOverload | type(getattr))


def _uses_of_copies_first(module: fx.GraphModule) -> None:
    """Move the uses of low-precision copies to the beginning, since each would end a piece."""
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    if not placeholders:
        return
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), UseOfCopy):
            placeholders[-1].append(node)
    module.recompile()
