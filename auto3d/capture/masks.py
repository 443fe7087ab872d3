"""Drop attention masks that do not depend on data and that the attention kernel can replace.

Such a mask hides nothing, or exactly the later positions. A model's code may compute it in dozens of operations for
each micro-batch; the kernel needs only its argument ``is_causal``.
"""

import torch
from torch import fx

from auto3d.capture.fixed_values import positions, value_of
from auto3d.capture.pointwise import Pointwise, UndecidedError, aten, is_false

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
MASK, DROPOUT = 3, 4  # positions of these arguments of ATTENTION


def leave_masks_to_kernel(program: fx.Graph) -> None:
    """Drop such masks from the attentions of ``program``; the operations that made them are left without users.

    A mask is dropped only if each of its elements is known for every sample and head. A mask that takes too much memory
    or time to compute stays.
    """
    numbers: dict[str, int] = {}  # number of each way to make a tensor; layers with equal masks have the same
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
    """The operations that make ``mask``, in order; None if it depends on data, weights or random numbers."""
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
    """A number that is equal for equal operations on equal arguments; ``numbers`` has the numbers assigned so far."""
    of_node: dict[fx.Node, str] = {}
    for node in makers:
        arguments = fx.map_arg((node.args, node.kwargs), lambda used: of_node[used])
        of_node[node] = f"%{numbers.setdefault(f'{node.target} {arguments}', len(numbers))}"
    return int(of_node[makers[-1]][1:])


def _hides(makers: list[fx.Node], rows: int, columns: int) -> tuple[bool, bool]:
    """(whether the mask hides nothing, whether it hides exactly the later keys). True means that a query sees a key."""
    with torch.no_grad(), torch.device("cpu"):
        try:
            mask = value_of(makers)
            if len(mask.shape) < 2 or 0 in mask.shape:
                return False, False
            query, key = positions((*mask.shape[:-2], rows, columns))
            earlier = Pointwise(aten.le.Tensor, (key, query), {}, torch.bool)
            hides_later = is_false(Pointwise(aten.ne.Tensor, (mask, earlier), {}, torch.bool), rows, columns)
            hides_nothing = is_false(Pointwise(aten.logical_not.default, (mask,), {}, torch.bool), rows, columns)
        except (UndecidedError, NotImplementedError):  # the second: an operator without a CPU kernel
            return False, False
    return hides_nothing, hides_later
