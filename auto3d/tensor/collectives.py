"""The operators that a tensor-parallel program has besides those of the model: conversions between placements.

Here they are declared with their shapes and gradients, so that a program can be described on meta tensors. A rank runs
them through its process group (runtime/tensor_group.py), and a check runs all ranks' in one process
(tensor/all_shards.py). Each stands for two collectives, one in the forward and one in the backward:

| operator | from → to | forward | backward |
| --- | --- | --- | --- |
| reduce | partial → whole | all-reduce | nothing |
| copy | whole → copied | nothing | all-reduce |
| reduce_copy | partial → copied | all-reduce | all-reduce |
| gather | split → whole | all-gather | slice |
| gather_copy | split → copied | all-gather | reduce-scatter |
| scatter | whole → split | slice | all-gather |
| scatter_copy | copied → split | slice | pad with zeros |
| reduce_scatter | partial → split | reduce-scatter | all-gather |
| spread | whole → partial | rank 0 keeps it, the others have zeros | nothing |
"""

from dataclasses import dataclass
from typing import Any

import torch

from auto3d.tensor_placement import Kind

NAMESPACE = "auto3d"


class Communication:
    """Names of what a conversion does among the ranks, in the forward or in the backward."""

    NOTHING = "nothing"
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"


@dataclass(frozen=True, slots=True)
class Conversion:
    """One row of the table above."""

    name: str
    source: Kind
    target: Kind
    forward: str
    backward: str


_C = Communication
CONVERSIONS = {
    each.name: each
    for each in (
        Conversion("reduce", Kind.PARTIAL, Kind.WHOLE, _C.ALL_REDUCE, _C.NOTHING),
        Conversion("copy", Kind.WHOLE, Kind.COPIED, _C.NOTHING, _C.ALL_REDUCE),
        Conversion("reduce_copy", Kind.PARTIAL, Kind.COPIED, _C.ALL_REDUCE, _C.ALL_REDUCE),
        Conversion("gather", Kind.SPLIT, Kind.WHOLE, _C.ALL_GATHER, _C.NOTHING),
        Conversion("gather_copy", Kind.SPLIT, Kind.COPIED, _C.ALL_GATHER, _C.REDUCE_SCATTER),
        Conversion("scatter", Kind.WHOLE, Kind.SPLIT, _C.NOTHING, _C.ALL_GATHER),
        Conversion("scatter_copy", Kind.COPIED, Kind.SPLIT, _C.NOTHING, _C.NOTHING),
        Conversion("reduce_scatter", Kind.PARTIAL, Kind.SPLIT, _C.REDUCE_SCATTER, _C.ALL_GATHER),
        Conversion("spread", Kind.WHOLE, Kind.PARTIAL, _C.NOTHING, _C.NOTHING),
    )
}
