"""Sums of a model's work over ranges of operations, which a search looks up many times."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from auto3d.cost.times import before
from auto3d.cost.work import Work
from auto3d.plan import StagePlan


class WorkTables:
    """Sums over ranges of operations of one Work. A range ``(first, last)`` excludes ``last``."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._sums: dict[tuple[str, int], np.ndarray] = {}

    @cached_property
    def blocks(self) -> tuple[int, int]:
        """The range of the repeated blocks, found by the tensor-parallel all-reduces of forward and backward.

        It begins after the all-reduce of a divided embedding, if there is one, and ends after the last operation whose
        result the forward all-reduces.
        """
        inner = np.flatnonzero(self.work.backward_reduced)
        ends = np.flatnonzero(self.work.reduced)
        if not len(inner) or not len(ends):
            return 0, len(self.work)
        return int(ends[0]) + 1 if ends[0] < inner[0] else 0, int(ends[-1]) + 1

    def blocks_of(self, operations: Sequence[tuple[int, int]]) -> int:
        """The number of repeated blocks in ``operations``: the backward of each has two tensor-parallel all-reduces."""
        return sum(int(np.count_nonzero(self.work.backward_reduced[first:last])) for first, last in operations) // 2

    def saved(self, operations: Sequence[tuple[int, int]], tp: int) -> float:
        return self._sum("saved", operations, tp)

    def deferred(self, operations: Sequence[tuple[int, int]], tp: int) -> float:
        return self._sum("deferred", operations, tp)

    def fixed(self, operations: Sequence[tuple[int, int]], tp: int) -> float:
        return self._sum("fixed", operations, tp)

    def working(self, operations: Sequence[tuple[int, int]], tp: int) -> float:
        """Bytes that the largest of ``operations`` reads and makes on one of ``tp`` devices."""
        return max(float(self._divided("working", tp)[first:last].max()) for first, last in operations)

    def _divided(self, name: str, tp: int) -> np.ndarray:
        return np.where(self.work.parallel, 1 / tp, 1.0) * getattr(self.work, name)

    def _sum(self, name: str, operations: Sequence[tuple[int, int]], tp: int) -> float:
        if (name, tp) not in self._sums:
            self._sums[name, tp] = before(self._divided(name, tp))
        table = self._sums[name, tp]
        return sum(float(table[last] - table[first]) for first, last in operations)

    def parameters(self, operations: Sequence[tuple[int, int]], tp: int) -> float:
        """Elements of the trained parameters that ``operations`` use on one of ``tp`` devices, each counted once."""
        total = self._sum("parameters", operations, tp)
        for elements, users in self.work.tied:
            if not _inside(users[0], operations) and any(_inside(user, operations) for user in users):
                total += elements / (tp if self.work.parallel[users[0]] else 1)
        return total

    def shared(self, stages: Sequence[StagePlan], tp: int) -> list[tuple[float, list[int]]]:
        """Parameters that are tied across stages: (elements on each rank, numbers of the stages) of each."""
        tied = []
        for elements, users in self.work.tied:
            holders = [n for n, stage in enumerate(stages) if any(_inside(user, stage.operations) for user in users)]
            if len(holders) > 1:
                tied.append((elements / (tp if self.work.parallel[users[0]] else 1), holders))
        return tied


def without(operations: Sequence[tuple[int, int]], kept: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The ranges of ``operations`` that remain without the ranges ``kept``, which lie inside them in order."""
    remaining = []
    for first, last in operations:
        for start, stop in kept:
            if first <= start and stop <= last:
                if start > first:
                    remaining.append((first, start))
                first = stop
        if first < last:
            remaining.append((first, last))
    return tuple(remaining)


def _inside(position: int, operations: Sequence[tuple[int, int]]) -> bool:
    return any(first <= position < last for first, last in operations)
