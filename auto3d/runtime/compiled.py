"""A segment's program compiled by torch.compile, in pieces around the operations that must run as they are.

A random operator seeds its generator first, and a user's autograd Function may run any code: these stay between pieces
that inductor compiles. Pieces have static shapes, so none is compiled again after the warm-up.
"""

from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from auto3d.runtime.low_precision import UseOfCopy


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
            setattr(whole, name, _Compiled(piece))
    return whole


class _Compiled(nn.Module):
    def __init__(self, piece: nn.Module) -> None:
        super().__init__()
        self._run = torch.compile(piece, fullgraph=True, dynamic=False)

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
