"""The conversions between placements, and what the ranks exchange in each, for those who do without torch."""

from dataclasses import dataclass
from enum import Enum

from auto3d.tensor_placement import Kind


class Collective(Enum):
    """What the ranks do together."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"


@dataclass(frozen=True, slots=True)
class Conversion:
    """One row of the table in tensor/collectives.py; None where the ranks exchange nothing."""

    name: str
    source: Kind
    target: Kind
    forward: Collective | None
    backward: Collective | None


CONVERSIONS = {
    each.name: each
    for each in (
        Conversion("reduce", Kind.PARTIAL, Kind.WHOLE, Collective.ALL_REDUCE, None),
        Conversion("copy", Kind.WHOLE, Kind.COPIED, None, Collective.ALL_REDUCE),
        Conversion("reduce_copy", Kind.PARTIAL, Kind.COPIED, Collective.ALL_REDUCE, Collective.ALL_REDUCE),
        Conversion("gather", Kind.SPLIT, Kind.WHOLE, Collective.ALL_GATHER, None),
        Conversion("gather_copy", Kind.SPLIT, Kind.COPIED, Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
        Conversion("scatter", Kind.WHOLE, Kind.SPLIT, None, Collective.ALL_GATHER),
        Conversion("scatter_copy", Kind.COPIED, Kind.SPLIT, None, None),
        Conversion("reduce_scatter", Kind.PARTIAL, Kind.SPLIT, Collective.REDUCE_SCATTER, Collective.ALL_GATHER),
        Conversion("spread", Kind.WHOLE, Kind.PARTIAL, None, None),
    )
}
