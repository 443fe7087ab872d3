"""Rules of attention kernels: heads, samples and queries are independent of each other."""

from collections.abc import Callable
from typing import Any

import torch

from auto3d.tensor.rules.call import COPIED, WHOLE, Axis, Call, Inner, Rule, Split, TensorPlacement, Way
from auto3d.tensor_placement import PlacementKind

aten = torch.ops.aten


def _attention(call: Call) -> Rule:
    """query [..., heads, queries, width], key and value [..., key-value heads, keys, width], and perhaps a mask.

    With grouped-query attention the key-value heads are fewer: the n-th part of them serves the n-th part of the heads.
    If there are fewer than ranks, each rank repeats them for all heads and takes what belongs to its own heads.
    """
    query, key, value = call.shapes[:3]
    several = call.argument("enable_gqa", False)
    mask = call.operand_number("attn_mask")
    result = call.results[0]
    axes = []
    for dim in range(len(query) - 1):
        is_query = dim == len(query) - 2
        if result[dim] < 2 or (is_query and call.argument("is_causal", False)):
            continue
        operands: list[int | None] = [dim, None, None]
        if not is_query:  # an operand that is broadcast, such as a single key-value head, is needed as a whole
            operands = [None if shape[dim] == 1 and not several else dim for shape in (query, key, value)]
        if mask is not None:
            shape = call.shapes[mask]
            place = dim - len(result) + len(shape)
            operands.append(place if place >= 0 and shape[place] > 1 else None)
        axes.append(Axis(tuple(operands), (dim,)))
    heads = len(query) - 3
    grouped = heads > 0 and key[heads] != query[heads] and several
    special = (_shared_heads(call, heads, mask),) if grouped else ()

    def localise(call: Call, way: Way, shards: int) -> tuple[Any, tuple, dict]:
        if way not in special:
            return call.node.target, call.node.args, call.node.kwargs
        query_node, *shared = call.operands[:3]
        times, take = query[heads] // key[heads], torch.ops.auto3d.scatter_copy.default
        taken = []
        for word, node in zip(("key", "value"), shared, strict=True):
            repeated = Inner(f"{word}_repeat", aten.repeat_interleave.self_int, (node, times, heads))
            taken.append(Inner(f"{word}_take", take, (repeated, shards, heads, [query[heads]])))
        return call.node.target, (query_node, *taken, *call.node.args[3:]), call.node.kwargs

    return Rule(axes=tuple(axes), special=special, localise=localise, product=True)


def _shared_heads(call: Call, heads: int, mask: int | None) -> Way:
    """Every rank has all key-value heads and some of the heads."""
    query = call.shapes[0]
    needs = [TensorPlacement(PlacementKind.SPLIT, Split(heads, (query[heads],)))]
    needs += [COPIED if node.meta["val"].requires_grad else WHOLE for node in call.operands[1:3]]
    if mask is not None:
        shape = call.shapes[mask]
        place = heads - len(query) + len(shape)
        has_heads = place >= 0 and shape[place] > 1
        gradient = call.operands[mask].meta["val"].requires_grad
        of_heads = TensorPlacement(PlacementKind.SPLIT, Split(place, (query[heads],)))
        needs.append(of_heads if has_heads else COPIED if gradient else WHOLE)
    return Way(tuple(needs), (needs[0],))


RULES: dict[str, Callable[[Call], Rule]] = {"scaled_dot_product_attention": _attention}
