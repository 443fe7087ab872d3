"""How a Plan splits a model's weights: by a user's rules, by those that are known for the model, or derived."""

from collections.abc import Mapping

from auto3d.capture.model import CapturedModel
from auto3d.capture.skeleton import skeleton
from auto3d.tensor.model import tensor_parallel
from auto3d.tensor.weight_rules import known_rules, ruled_parameters, weight_splits
from auto3d.tensor_placement import Split


def planned_split(
    captured: CapturedModel, shards: int, *, rules: Mapping[str, str], sequence_parallel: bool = False
) -> dict[str, Split]:
    """``Plan.split`` of ``captured`` on ``shards`` ranks; what has no entry is whole on every rank.

    A user's ``rules`` come first, then those that are known for the model, whose other weights stay whole. If none are
    known, the splits that the user's rules do not name are derived from the graph. Raises PlanError if a user's rule is
    not possible.
    """
    known = known_rules(skeleton(captured.exported.build).model)
    splits = weight_splits(captured, shards, rules=rules, known=known).splits
    if known is not None:
        return splits
    derived = tensor_parallel(captured, shards, sequence_parallel=sequence_parallel).split
    named = ruled_parameters(captured, rules)
    return splits | {name: split for name, split in derived.items() if name not in named}


def ruled_reasons(captured: CapturedModel, shards: int, *, rules: Mapping[str, str]) -> dict[str, str]:
    """The reasons why weights stay whole in ``planned_split`` by its rules; not those of what is derived."""
    known = known_rules(skeleton(captured.exported.build).model)
    ruled = weight_splits(captured, shards, rules=rules, known=known)
    unnamed = captured.graph.parameters.keys() - ruled.splits.keys() if known is not None else set()
    return dict.fromkeys(unnamed, "no rule of this model splits it") | ruled.whole
