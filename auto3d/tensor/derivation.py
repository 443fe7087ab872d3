"""The placements chosen for a program, and the error if none are possible."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from auto3d.plan import PlanError
from auto3d.tensor.rules.call import Way
from auto3d.tensor.ways import OperationWays
from auto3d.tensor_placement import Split, TensorPlacement


class ImpossibleSplitError(PlanError):
    """No operation can use the parameter or buffer ``name`` as it is pinned."""

    def __init__(self, name: str, split: Split, operator: str) -> None:
        super().__init__(
            f"{name} cannot be split along dimension {split.dim} in blocks {list(split.blocks)}, because {operator} "
            "needs it in another way; split it along another dimension, or not at all",
            key="split",
        )
        self.name = name


@dataclass(frozen=True, slots=True)
class Converted:
    """A conversion of the value of ``node`` before an operation needs it."""

    node: fx.Node
    source: TensorPlacement
    target: TensorPlacement


@dataclass(frozen=True, slots=True)
class Decision:
    """How one operation runs, and the conversions of its operands, in order."""

    way: Way
    conversions: tuple[Converted, ...]


@dataclass(frozen=True, kw_only=True)
class Derivation:
    """The decisions for all operations, and the placement of the state that they use, by placeholder."""

    operations: tuple[OperationWays, ...]
    decisions: tuple[Decision, ...]
    state: Mapping[str, TensorPlacement]
    loss: tuple[Converted, ...]  # conversions of the loss, which ends whole
    cost: float
    """Bytes that each rank sends for one sample, plus what latencies and whole weights count."""
