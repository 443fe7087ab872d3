"""A mask that no data enters, and that hides nothing or the later positions alone, is left to the attention's kernel.

A model's code may make it anew for each micro-batch, in dozens of operations; a kernel that is told so needs none.
"""

import torch
from torch import fx

from auto3d.capture.fixed_values import positions, value_of
from auto3d.capture.pointwise import Pointwise, UndecidedError, aten, is_false

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
MASK, DROPOUT = 3, 4  # among its arguments


def leave_masks_to_kernel(program: fx.Graph) -> None:
    """Drop such masks from the attentions of ``program``; what made them is left without a user.

    A mask is dropped only where each of its elements is known, for every sample and head. One that takes too much
    memory or time to find out stays.
    """
    numbers: dict[str, int] = {}  # one number per way to make a tensor: layers with equal masks share it
    known: dict[tuple[int, int, int], tuple[bool, bool]] = {}
    for attention in program.find_nodes(op="call_function", target=ATTENTION):
        mask = attention.args[MASK] if len(attention.args) > MASK else None
        if not isinstance(mask, fx.Node) or mask.meta["val"].dtype is not torch.bool:
            continue
        makers = _makers(mask)
        if makers is None:
            continue
        rows, columns = (
            attention.args[operand].meta["val"].shape[-2] for operand in (0, 1)
        )  # number of queries, number of keys
        key = (_number(makers, numbers), rows, columns)
        if key not in known:
            known[key] = _hides(makers, rows, columns)
        hides_nothing, hides_later = known[key]
        if hides_nothing or hides_later:
            attention.args = (*attention.args[:MASK], None, *attention.args[DROPOUT:])
            attention.kwargs = {**attention.kwargs, "is_causal": hides_later}


def _makers(mask: fx.Node) -> list[fx.Node] | None:
    """Operations that make ``mask``, in order; None where data, weights or chance enter."""
    seen: set[fx.Node] = set()
    pending = [mask]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(current.target, "tags", ()):
            return None
        pending += current.all_input_nodes
    return sorted(seen)


def _number(makers: list[fx.Node], numbers: dict[str, int]) -> int:
    """Equal for equal operations on equal arguments, new to ``numbers`` otherwise."""
    of_node: dict[fx.Node, str] = {}
    for node in makers:
        arguments = fx.map_arg((node.args, node.kwargs), lambda used: of_node[used])
        of_node[node] = f"%{numbers.setdefault(f'{node.target} {arguments}', len(numbers))}"
    return int(of_node[makers[-1]][1:])


def _hides(makers: list[fx.Node], rows: int, columns: int) -> tuple[bool, bool]:
    """Whether a mask, true where a query sees a key, hides nothing at all; whether it hides the later keys alone."""
    with torch.no_grad(), torch.device("cpu"):
        try:
            mask = value_of(makers)
            if len(mask.shape) < 2 or 0 in mask.shape:
                return False, False
            query, key = positions((*mask.shape[:-2], rows, columns))
            earlier = Pointwise(aten.le.Tensor, (key, query), {}, torch.bool)
            hides_later = is_false(Pointwise(aten.ne.Tensor, (mask, earlier), {}, torch.bool), rows, columns)
            hides_nothing = is_false(Pointwise(aten.logical_not.default, (mask,), {}, torch.bool), rows, columns)
        except (UndecidedError, NotImplementedError):  # the latter: an operator that no CPU has
            return False, False
    return hides_nothing, hides_later
