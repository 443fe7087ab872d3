"""How placements pass through the operators of ATen: one function per family of operators, and the table of them.

A rule says along which dimensions an operator can be split among ranks, so that each runs it on its shards alone. An
operator without a rule runs on whole tensors, which is always right.
"""

from collections.abc import Callable

from auto3d.tensor.rules import attention, contractions, indexing, layouts, normalisation, pointwise, products, slices
from auto3d.tensor.rules.call import Call, Rule

RULES: dict[str, Callable[[Call], Rule]] = {
    **pointwise.RULES,
    **layouts.RULES,
    **products.RULES,
    **contractions.RULES,
    **normalisation.RULES,
    **attention.RULES,
    **indexing.RULES,
    **slices.RULES,
}
"""Name of an operator without its overload, for example "add" -> its rule."""


def rule_of(call: Call) -> Rule:
    """The rule of ``call``; an empty Rule if its operator has none."""
    rule = RULES.get(call.operator)
    return rule(call) if rule is not None else Rule()
