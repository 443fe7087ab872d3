"""How a Plan splits a model's weights: as the user's rules and the model's known rules say, and else as derived."""

from collections.abc import Mapping

from auto3d.capture.model import CapturedModel
from auto3d.capture.skeleton import skeleton
from auto3d.derived.shards import derived_split
from auto3d.garbage import garbage_collection_paused
from auto3d.plan import PlanError
from auto3d.share import Share
from auto3d.tensor.derivation import ImpossibleSplitError
from auto3d.tensor.known_rules import RULES_KEY
from auto3d.tensor.weight_rules import RuledSplits, known_rules, weight_splits
from auto3d.tensor_placement import Split


def planned_split(captured: CapturedModel, share: Share, *, rules: Mapping[str, str]) -> dict[str, Split]:
    """``Plan.split`` of ``captured`` for ranks with ``share`` of its work; what has no entry is whole on every rank.

    A user's ``rules`` come first, then the rules that are known for the model. The graph decides the splits that no
    rule names, with the splits by rules fixed. Raises PlanError if a user's rule is not possible; a known rule that is
    not possible counts as none.
    """
    ruled = _ruled(captured, share.tp, rules)
    pinned = dict(ruled.pinned)
    while True:
        try:
            return derived_split(captured, share, pinned=pinned)
        except ImpossibleSplitError as error:
            if error.name in ruled.by_user:
                raise PlanError(error.problem, key=RULES_KEY) from None
            del pinned[error.name]


def ruled_reasons(captured: CapturedModel, shards: int, *, rules: Mapping[str, str]) -> dict[str, str]:
    """The reasons why weights stay whole in ``planned_split`` by its rules; without reasons of what is derived."""
    ruled = _ruled(captured, shards, rules)
    whole = (name for name, split in ruled.pinned.items() if split is None)
    return ruled.impossible | dict.fromkeys(whole, "a rule says so")


def _ruled(captured: CapturedModel, shards: int, rules: Mapping[str, str]) -> RuledSplits:
    if known_rules not in captured.derived:
        with garbage_collection_paused():
            captured.derived[known_rules] = known_rules(skeleton(captured.exported.build).model)
    return weight_splits(captured, shards, rules=rules, known=captured.derived[known_rules])
