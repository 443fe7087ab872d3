"""The ranks of one pipeline device as an array with named axes."""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

PIPELINE, REPLICA, TENSOR = "pipeline", "replica", "tensor"
"""Axes of a mesh: pipelines train different samples, replicas of a stage different samples of a micro-batch, and the
ranks of a tensor-parallel group have different shards of the weights."""


class Mesh(NamedTuple):
    """``ranks`` in an array whose ``axes`` have these names and sizes, the outermost first."""

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    def size(self, axis: str) -> int:
        return dict(self.axes)[axis]

    def coordinate(self, rank: int) -> Mapping[str, int]:
        """The place of ``rank`` on each axis."""
        place, coordinates = self.ranks.index(rank), {}
        for axis, size in reversed(self.axes):
            place, coordinates[axis] = divmod(place, size)
        return coordinates

    def at(self, **coordinate: int) -> tuple[int, ...]:
        """The ranks at these places on some axes, in order of the other axes.

        In a mesh of 2 pipelines × 1 replica × 2 shards of the ranks 0 to 3, ``at(tensor=1)`` gives the ranks 1 and 3.
        """
        places = [0]
        for axis, size in self.axes:
            among = range(size) if axis not in coordinate else (coordinate[axis],)
            places = [place * size + here for place in places for here in among]
        return tuple(self.ranks[place] for place in places)

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """The groups of ranks whose places differ on ``axis`` alone, in order of the other axes."""
        names = [name for name, _ in self.axes]
        step = prod(size for _, size in self.axes[names.index(axis) + 1 :])
        span = step * self.size(axis)
        return [
            self.ranks[first + inner : first + span : step]
            for first in range(0, len(self.ranks), span)
            for inner in range(step)
        ]
