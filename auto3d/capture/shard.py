"""One rank's shard of a split tensor: cut out of the whole tensor, and put back into it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from auto3d.tensor_placement import Split


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard number ``shard`` of ``shards`` of a tensor that is split as ``split`` says."""

    split: Split
    shard: int
    shards: int

    def __str__(self) -> str:
        return f"shard {self.shard} of {self.shards} along {self.split.dim} of {list(self.split.blocks)}"

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(start in the whole dimension, start in the shard, length) of each run of elements; padding has none."""
        starts = accumulate(self.split.local_blocks(self.shards), initial=0)
        for (first, last), start in zip(self.split.ranges(self.shard, self.shards), starts, strict=False):
            if last > first:
                yield first, start, last - first

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of the shard of a tensor of shape ``whole``."""
        return self.split.local_shape(whole, self.shards)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The shard of ``whole``, contiguous, in memory of its own, padded with zeros."""
        shape = self.shape(whole.shape)
        runs = list(self.runs())
        complete = sum(length for _, _, length in runs) == self.split.local_size(self.shards)
        shard = whole.new_empty(shape) if complete else whole.new_zeros(shape)
        for first, start, length in runs:
            shard.narrow(self.split.dim, start, length).copy_(whole.narrow(self.split.dim, first, length))
        return shard

    def put_back(self, shard: torch.Tensor, whole: torch.Tensor) -> None:
        """Write ``shard`` into its place in ``whole``."""
        for first, start, length in self.runs():
            whole.narrow(self.split.dim, first, length).copy_(shard.narrow(self.split.dim, start, length))


def joined(shards: Sequence[torch.Tensor], split: Split) -> torch.Tensor:
    """The whole tensor of which ``shards`` are the shards of all ranks in order; without their padding."""
    starts = accumulate(split.local_blocks(len(shards)), initial=0)
    ranges = [split.ranges(number, len(shards)) for number in range(len(shards))]
    pieces = [
        shard.narrow(split.dim, start, spans[block][1] - spans[block][0])
        for block, start in zip(range(len(split.blocks)), starts, strict=False)
        for shard, spans in zip(shards, ranges, strict=True)
    ]
    return torch.cat(pieces, split.dim)
