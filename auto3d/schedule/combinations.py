"""The features of a plan, and of how it runs, that do not go together: one table, which docs/runtime.md shows.

Searches ask it before they make a Plan, and the runtime before a rank starts.
"""

from collections.abc import Collection
from dataclasses import dataclass

from auto3d.plan import NO_OVERLAP, Plan, PlanError
from auto3d.schedule.shape import shares_of
from auto3d.share import Share


@dataclass(frozen=True)
class Feature:
    """What a plan or a run may have; ``without`` says how it is left out."""

    name: str
    without: str


SLICES = Feature("slices of the sequence", "a schedule without slices, such as 1f1b")
SHARDS_OF_SLICES = Feature("tensor parallelism of slices of the sequence", "tp: 1")
TENSOR_PARALLELISM = Feature("tensor parallelism", "tp: 1")
SEQUENCE_PARALLELISM = Feature("sequence parallelism", "sequence_parallel: false")
SUB_PIPELINING = Feature("sub-pipelining", f"tensor_overlap: {NO_OVERLAP}")
COMPILED = Feature("compiled code", "training.compile: false")
EMULATED = Feature("emulated devices", "training.compute: real")

EXCLUDED: tuple[tuple[Feature, Feature, str], ...] = (
    (SLICES, SEQUENCE_PARALLELISM, "both divide the sequence"),
    (SLICES, SUB_PIPELINING, "slices run one after the other, and halves take turns"),
    (COMPILED, SLICES, "a slice keeps keys and values for later ones, which compiled code does not"),
    (COMPILED, EMULATED, "emulated devices compute nothing"),
    (EMULATED, SHARDS_OF_SLICES, "the times of emulated collectives are those of all tokens"),
)
"""Pairs of features, with the reason."""


def divisions(share: Share, *, overlap: str) -> set[Feature]:
    """The features of a plan whose ranks have ``share`` of the work."""
    used = {
        SLICES: share.slices > 1,
        SHARDS_OF_SLICES: share.slices > 1 and share.tp > 1,
        TENSOR_PARALLELISM: share.tp > 1,
        SEQUENCE_PARALLELISM: share.sequence_parallel,
        SUB_PIPELINING: share.tp > 1 and overlap != NO_OVERLAP,
    }
    return {feature for feature, is_there in used.items() if is_there}


def divisions_of(plan: Plan) -> set[Feature]:
    """As ``divisions``, for a Plan."""
    return divisions(shares_of(plan)[0], overlap=plan.tensor_overlap)


def check_together(features: Collection[Feature]) -> None:
    """Raise PlanError if two of ``features`` do not go together."""
    for feature, other, reason in EXCLUDED:
        if feature in features and other in features:
            raise PlanError(
                f"{feature.name} and {other.name} do not go together: {reason}; "
                f"use {feature.without}, or {other.without}"
            )
