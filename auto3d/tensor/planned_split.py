"""How a Plan splits a model's weights: by a user's rules, by those that are known for the model, or derived."""

from collections.abc import Mapping

from auto3d.capture.model import CapturedModel
from auto3d.capture.skeleton import skeleton
from auto3d.tensor.model import tensor_parallel
from auto3d.tensor.weight_rules import known_rules, weight_splits
from auto3d.tensor_placement import Split


def planned_split(
    captured: CapturedModel, shards: int, *, rules: Mapping[str, str], sequence_parallel: bool = False
) -> dict[str, Split]:
    """``Plan.split`` of ``captured`` on ``shards`` ranks; what has no entry is whole on every rank.

    A user's ``rules`` come first, then the rules that are known for the model; weights without a rule are whole. If
    there is neither, the splits with the least communication are derived from the graph. Raises PlanError if a user's
    rule is not possible.
    """
    known = known_rules(skeleton(captured.exported.build).model)
    if rules or known is not None:
        return weight_splits(captured, shards, rules=rules, known=known)
    return tensor_parallel(captured, shards, sequence_parallel=sequence_parallel).split
