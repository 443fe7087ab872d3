"""Placements: how the ranks of a tensor-parallel group hold one tensor, and its gradient.

| placement | forward | gradient |
| --- | --- | --- |
| whole | every rank has the tensor | every rank has the gradient |
| copied | every rank has the tensor | the sum over the ranks is the gradient |
| split | every rank has its shard | every rank has the shard of the gradient |
| partial | the sum over the ranks is the tensor | every rank has the gradient |

A copied tensor is what enters Megatron-LM's column-parallel product, a partial tensor is what leaves its row-parallel
product (Shoeybi et al. 2019, section 3).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pydantic import ConfigDict


class PlacementKind(Enum):
    WHOLE = "whole"
    COPIED = "copied"
    SPLIT = "split"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class Split:
    """How one dimension of a tensor is split. Each of its ``blocks`` is split evenly among the ranks, in order.

    The blocks are sizes that add up to the dimension; a fused weight of query, key and value has one block for each of
    the three. A single block need not be divisible: every rank then has the same number of elements, and the last
    elements are padded with zeros.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    dim: int
    blocks: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.blocks)

    def local_blocks(self, shards: int) -> tuple[int, ...]:
        """The sizes of the blocks on one of ``shards`` ranks; padding included."""
        return tuple(-(-block // shards) for block in self.blocks)

    def local_size(self, shards: int) -> int:
        return sum(self.local_blocks(shards))

    def local_shape(self, whole: Sequence[int], shards: int) -> tuple[int, ...]:
        """The shape of what one of ``shards`` ranks has of a tensor of shape ``whole``; padding included."""
        local = self.local_size(shards)
        return tuple(local if dim == self.dim else size for dim, size in enumerate(whole))

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The shape of the tensor of which a rank has a part of shape ``local``."""
        return tuple(self.size if dim == self.dim else size for dim, size in enumerate(local))

    def padding(self, shards: int) -> int:
        """Elements that the dimension has too few for an even split."""
        return self.local_size(shards) * shards - self.size

    def ranges(self, shard: int, shards: int) -> list[tuple[int, int]]:
        """``[first, last)`` of each run of elements of the whole dimension that rank ``shard`` has, in its order."""
        runs, start = [], 0
        for block, local in zip(self.blocks, self.local_blocks(shards), strict=True):
            first = min(shard * local, block)
            runs.append((start + first, start + min(first + local, block)))
            start += block
        return runs


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """The placement of one tensor; ``split`` is there if and only if its kind is SPLIT."""

    kind: PlacementKind
    split: Split | None = None

    def __str__(self) -> str:
        if self.split is None:
            return self.kind.value
        blocks = f" in {len(self.split.blocks)} blocks" if len(self.split.blocks) > 1 else ""
        return f"split along {self.split.dim}{blocks}"

    def local_shape(self, shape: Sequence[int], shards: int) -> tuple[int, ...]:
        """The shape of what one of ``shards`` ranks has of a tensor of ``shape``."""
        return tuple(shape) if self.split is None else self.split.local_shape(shape, shards)


WHOLE = TensorPlacement(PlacementKind.WHOLE)
COPIED = TensorPlacement(PlacementKind.COPIED)
PARTIAL = TensorPlacement(PlacementKind.PARTIAL)


def split_along(dim: int, *blocks: int) -> TensorPlacement:
    return TensorPlacement(PlacementKind.SPLIT, Split(dim, blocks))
