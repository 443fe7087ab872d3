"""Constant folding: a stage computes values that depend on no data once, not for each micro-batch."""

from typing import Any

import torch
from torch import fx


@torch.no_grad()
def fold_constants(module: fx.GraphModule) -> None:
    """Replace operations that depend on no argument of ``module`` by buffers that hold their results.

    A captured program writes to nothing but its arguments, so these results never change.
    """
    graph = module.graph
    results: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "call_function" and all(used in results for used in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), results.__getitem__)
            results[node] = node.target(*args, **kwargs)
    for number, (node, result) in enumerate(results.items()):
        if isinstance(result, torch.Tensor) and not node.users.keys() <= results.keys():
            module.register_buffer(f"constant_{number}", result, persistent=False)
            with graph.inserting_before(node):
                buffer = graph.get_attr(f"constant_{number}")
            node.replace_all_uses_with(buffer, delete_user_cb=lambda user: user not in results)
    graph.eliminate_dead_code(lambda node: node not in results)
    module.recompile()
