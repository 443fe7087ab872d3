"""A mask that no data enters, and that hides nothing or the later positions alone, is left to the attention's kernel.

A model's code may make it anew for each micro-batch, in dozens of operations; a kernel that is told so needs none.
"""

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
MASK, DROPOUT = 3, 4  # among its arguments
_CPU = torch.device("cpu")


@torch.no_grad()
def leave_masks_to_kernel(program: fx.Graph) -> None:
    """Drop such masks from the attentions of ``program``; what made them is left without a user."""
    known: dict[fx.Node, Any] = {}
    for attention in program.find_nodes(op="call_function", target=ATTENTION):
        mask = attention.args[MASK] if len(attention.args) > MASK else None
        if not isinstance(mask, fx.Node) or mask.meta["val"].dtype is not torch.bool or not _is_fixed(mask):
            continue
        value = _value(mask, known)
        hides_later = torch.equal(value, torch.ones_like(value).tril())
        if hides_later or value.all():
            attention.args = (*attention.args[:MASK], None, *attention.args[DROPOUT:])
            attention.kwargs = {**attention.kwargs, "is_causal": hides_later}


def _is_fixed(node: fx.Node) -> bool:
    """Whether nothing but numbers of the model's code make it: no data, no weights, no chance."""
    seen, pending = set(), [node]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(current.target, "tags", ()):
            return False
        pending += current.all_input_nodes
    return True


def _value(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """What it computes, on the CPU: the export has burned the meta device into operators that make tensors."""
    pending = [node]
    while pending:
        current = pending[-1]
        missing = [used for used in current.all_input_nodes if used not in known]
        pending += missing
        if not missing:
            args, kwargs = fx.map_arg((current.args, current.kwargs), known.__getitem__)
            args, kwargs = tree_map_only(torch.device, lambda _: _CPU, (args, kwargs))
            known[current] = current.target(*args, **kwargs)
            pending.pop()
    return known[node]
