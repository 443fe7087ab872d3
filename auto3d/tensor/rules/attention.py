"""Rules of attention kernels: heads, samples and queries are independent of each other."""

from collections.abc import Callable

from auto3d.tensor.rules.call import Axis, Call, Rule


def _attention(call: Call) -> Rule:
    """query [..., heads, queries, width], key and value [..., key-value heads, keys, width], and perhaps a mask.

    With grouped-query attention the key-value heads are fewer: the n-th part of them serves the n-th part of the heads.
    """
    query, key = call.shapes[:2]
    mask = call.operand_number("attn_mask")
    result = call.results[0]
    axes = []
    for dim in range(len(query) - 1):
        is_query = dim == len(query) - 2
        if result[dim] < 2 or (is_query and call.argument("is_causal", False)):
            continue
        if not is_query and key[dim] != query[dim] and not call.argument("enable_gqa", False):
            continue
        operands: list[int | None] = [dim, *((None, None) if is_query else (dim, dim))]
        if mask is not None:
            shape = call.shapes[mask]
            place = dim - len(result) + len(shape)
            operands.append(place if place >= 0 and shape[place] > 1 else None)
        axes.append(Axis(tuple(operands), (dim,)))
    return Rule(axes=tuple(axes))


RULES: dict[str, Callable[[Call], Rule]] = {"scaled_dot_product_attention": _attention}
