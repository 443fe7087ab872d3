"""Shards of a dimension that is split into equal pieces: a shard in one operation, where Shard goes run by run."""

from dataclasses import dataclass

import torch

from auto3d.tensor_placement import Split


@dataclass(frozen=True, slots=True)
class EvenSplit:
    """Dimension ``dim`` of a tensor has ``blocks`` × ``shards`` × ``piece`` elements; a shard: a piece of each."""

    dim: int
    blocks: int
    shards: int
    piece: int

    def of(self, whole: torch.Tensor, shard: int) -> torch.Tensor:
        """One shard of ``whole``, contiguous, in memory of its own."""
        pieces = self._pieces(whole).select(self.dim + 1, shard)
        return pieces.clone(memory_format=torch.contiguous_format).view(self._local(whole))

    def put_back(self, shard: int, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Write ``part``, one shard, into its place in ``whole``."""
        pieces = self._pieces(whole).select(self.dim + 1, shard)
        pieces.copy_(part.view(pieces.shape))

    def stacked(self, whole: torch.Tensor) -> torch.Tensor:
        """All shards of ``whole``, [shards, …], contiguous, in new memory."""
        if self.blocks == 1:
            return torch.stack(whole.chunk(self.shards, self.dim))
        shards = self._pieces(whole).movedim(self.dim + 1, 0).clone(memory_format=torch.contiguous_format)
        return shards.view((self.shards, *self._local(whole)))

    def joined(self, stacked: torch.Tensor) -> torch.Tensor:
        """The whole tensor of its shards, [shards, …]; in new memory unless they follow one another."""
        if self.blocks == 1:
            shape = stacked.shape
            if shape[1 : self.dim + 1].numel() == 1:
                return stacked.view((*shape[1 : self.dim + 1], self.shards * self.piece, *shape[self.dim + 2 :]))
            return torch.cat(stacked.unbind(), self.dim)
        dim, shape = self.dim, stacked.shape[1:]
        before, after = shape[:dim], shape[dim + 1 :]
        pieces = stacked.view((self.shards, *before, self.blocks, self.piece, *after)).movedim(0, dim + 1)
        return pieces.reshape((*before, self.blocks * self.shards * self.piece, *after))

    def _pieces(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of ``whole``: [… blocks, shards, piece …]."""
        shape = whole.shape
        return whole.view((*shape[: self.dim], self.blocks, self.shards, self.piece, *shape[self.dim + 1 :]))

    def _local(self, whole: torch.Tensor) -> tuple[int, ...]:
        return (*whole.shape[: self.dim], self.blocks * self.piece, *whole.shape[self.dim + 1 :])


def even_split(split: Split, shards: int) -> EvenSplit | None:
    """``split`` among ``shards`` ranks; None if its blocks differ in size, or do not divide among the ranks."""
    size = split.blocks[0]
    if size % shards or any(block != size for block in split.blocks):
        return None
    return EvenSplit(split.dim, len(split.blocks), shards, size // shards)
