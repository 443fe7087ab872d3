"""What no data enters, a stage computes once and not for each micro-batch; a causal mask it leaves to the kernel."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
MASK, DROPOUT = 3, 4  # among its arguments


@torch.no_grad()
def fold_constants(module: fx.GraphModule) -> None:
    """Replace operations that depend on no argument of ``module`` by their results, which it then holds.

    A captured program writes to nothing but its arguments, so a result stays as it is.
    """
    graph = module.graph
    results: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "call_function" and all(used in results for used in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), results.__getitem__)
            results[node] = node.target(*args, **kwargs)
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        _leave_mask_to_kernel(node, results)
    for number, (node, result) in enumerate(results.items()):
        if isinstance(result, torch.Tensor) and not node.users.keys() <= results.keys():
            module.register_buffer(f"constant_{number}", result, persistent=False)
            with graph.inserting_before(node):
                held = graph.get_attr(f"constant_{number}")
            node.replace_all_uses_with(held, delete_user_cb=lambda user: user not in results)
    graph.eliminate_dead_code(lambda node: node not in results)
    module.recompile()


def _leave_mask_to_kernel(attention: fx.Node, results: Mapping[fx.Node, Any]) -> None:
    """Drop a mask that hides nothing, or the later positions alone, which a kernel told so need not compute."""
    mask = results.get(attention.args[MASK]) if len(attention.args) > MASK else None
    if mask is None or mask.dtype is not torch.bool:
        return
    hides_later = torch.equal(mask, torch.ones_like(mask).tril())
    if hides_later or mask.all():
        attention.args = (*attention.args[:MASK], None, *attention.args[DROPOUT:])
        attention.kwargs = {**attention.kwargs, "is_causal": hides_later}
