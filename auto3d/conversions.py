"""The conversions between placements, and what the ranks exchange in each."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from auto3d.tensor_placement import PlacementKind


class Collective(Enum):
    """What the ranks do together."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Conversion:
    """One row of the table in tensor/collectives.py; None where the ranks exchange nothing.

    Its ranks are a tensor-parallel group: the forward converts values, the backward their gradients. Or they are the
    holders of a parameter, over which its gradient is partial: the forward sums the gradient, and the backward brings
    back what its sum updates, the weight (``Plan.gradient_sum``).
    """

    name: str
    source: PlacementKind
    target: PlacementKind
    forward: Collective | None
    backward: Collective | None

    @property
    def splits(self) -> bool:
        """Whether each rank has a shard of the result."""
        return self.target is PlacementKind.SPLIT


_K, _C = PlacementKind, Collective
CONVERSIONS = {
    conversion.name: conversion
    for conversion in (
        Conversion("reduce", _K.PARTIAL, _K.WHOLE, _C.ALL_REDUCE, None),
        Conversion("copy", _K.WHOLE, _K.COPIED, None, _C.ALL_REDUCE),
        Conversion("reduce_copy", _K.PARTIAL, _K.COPIED, _C.ALL_REDUCE, _C.ALL_REDUCE),
        Conversion("gather", _K.SPLIT, _K.WHOLE, _C.ALL_GATHER, None),
        Conversion("gather_copy", _K.SPLIT, _K.COPIED, _C.ALL_GATHER, _C.REDUCE_SCATTER),
        Conversion("scatter", _K.WHOLE, _K.SPLIT, None, _C.ALL_GATHER),
        Conversion("scatter_copy", _K.COPIED, _K.SPLIT, None, None),
        Conversion(
            "reduce_scatter",
            _K.PARTIAL,
            _K.SPLIT,
            _C.REDUCE_SCATTER,
            _C.ALL_GATHER,
        ),
        Conversion("spread", _K.WHOLE, _K.PARTIAL, None, None),
    )
}


CONVERSION_BETWEEN = {(conversion.source, conversion.target): conversion for conversion in CONVERSIONS.values()}


def conversion_of(operator: Any) -> Conversion | None:
    """The conversion that an operator of torch, or of this name, does, such as auto3d.reduce.default; None: it does
    none."""
    namespace, _, name = str(operator).removesuffix(".default").partition(".")
    return CONVERSIONS.get(name) if namespace == "auto3d" else None
