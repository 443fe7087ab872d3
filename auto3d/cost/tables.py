"""Sums of a model's work over ranges of operations, which a search looks up many times."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from auto3d.cost.times import before
from auto3d.cost.work import Work
from auto3d.plan import StagePlan


class WorkTables:
    """Sums over ranges of operations of one Work, for one device. A range ``(first, last)`` excludes ``last``."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._sums: dict[str, np.ndarray] = {}
        self.parameters = lru_cache(2**12)(self._count_parameters)  # the plans of a search have many stages in common
        self.inputs = lru_cache(2**12)(self._count_inputs)
        self._holders = lru_cache(2**8)(self._find_holders)

    def blocks_of(self, operations: Sequence[tuple[int, int]]) -> int:
        """The number of repeated blocks in ``operations``."""
        return int(self._sum("blocks", operations))

    def last_block(self, operations: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """The operations of the last repeated block in ``operations``, from its input on; None if there is none."""
        starts = [int(p) for p in np.flatnonzero(self.work.blocks) if _inside(int(p), operations)]
        if not starts:
            return None
        weights = 0.0
        for place in reversed(range(len(starts))):
            weights += float(self.work.blocks[starts[place]])
            if weights >= 1:
                break
        first, last = next(span for span in operations if _inside(starts[place], (span,)))
        after = max(first, starts[place - 1] + 1 if place else first)
        narrowest = after + int(self.work.crossing[after : starts[place] + 1].argmin())
        return narrowest, last

    def block_inputs(self, operations: Sequence[tuple[int, int]]) -> float:
        """Bytes of the inputs of the repeated blocks in ``operations``, one input per block."""
        if "block_inputs" not in self._sums:
            inputs, after = np.zeros(len(self.work)), max(1, self.work.repeated[0])
            for start in map(int, np.flatnonzero(self.work.blocks)):
                # A block begins with its first product: its input is the narrowest cut since the block before began.
                inputs[start] = self.work.blocks[start] * self.work.crossing[min(after, start) : start + 1].min()
                after = start + 1
            self._sums["block_inputs"] = before(inputs)
        return self._sum("block_inputs", operations)

    def saved(self, operations: Sequence[tuple[int, int]]) -> float:
        return self._sum("saved", operations)

    def products(self, operations: Sequence[tuple[int, int]]) -> int:
        """The number of matrix products in the forward of ``operations``."""
        return int(self._sum("products", operations))

    def deferred(self, operations: Sequence[tuple[int, int]]) -> float:
        return self._sum("deferred", operations)

    def fixed(self, operations: Sequence[tuple[int, int]]) -> float:
        return self._sum("fixed", operations) + self.held_once(operations)

    def held_once(self, operations: Sequence[tuple[int, int]]) -> float:
        """Bytes of what ``Work.shared`` has for ``operations``."""
        return sum(size for size, users in self.work.shared if any(_inside(user, operations) for user in users))

    def _count_inputs(self, operations: tuple[tuple[int, int], ...], others: tuple[tuple[int, int], ...] = ()) -> float:
        """Bytes of the model's inputs that ``operations`` need, and ``others`` do not."""
        return sum(
            size
            for size, users in self.work.inputs
            if any(_inside(user, operations) for user in users) and not any(_inside(user, others) for user in users)
        )

    def copied(self, operations: Sequence[tuple[int, int]]) -> float:
        """Elements of parameters of ``operations`` whose gradients the tensor-parallel ranks add up."""
        return self._sum("copied", operations)

    def _sum(self, name: str, operations: Sequence[tuple[int, int]]) -> float:
        if name not in self._sums:
            self._sums[name] = before(getattr(self.work, name))
        table = self._sums[name]
        return sum(float(table[last] - table[first]) for first, last in operations)

    def _count_parameters(self, operations: tuple[tuple[int, int], ...]) -> float:
        """Elements of the trained parameters that ``operations`` use, each counted once."""
        total = self._sum("parameters", operations)
        for elements, users in self.work.tied:
            if not _inside(users[0], operations) and any(_inside(user, operations) for user in users):
                total += elements
        return total

    def first_parameters(self, operations: Sequence[tuple[int, int]]) -> float:
        """Elements of the trained parameters of the first of ``operations`` that has any: their gradients come last."""
        for first, last in operations:
            if positions := np.flatnonzero(self.work.parameters[first:last]).tolist():
                return float(self.work.parameters[first + positions[0]])
        return 0.0

    def shared(self, stages: Sequence[StagePlan]) -> list[tuple[float, list[int]]]:
        """Parameters that are tied across stages, as (elements on a rank, numbers of the stages)."""
        return self._holders(tuple(stage.operations for stage in stages)) if self.work.tied else []

    def _find_holders(self, stages: tuple[tuple[tuple[int, int], ...], ...]) -> list[tuple[float, list[int]]]:
        tied = []
        for elements, users in self.work.tied:
            holders = [n for n, operations in enumerate(stages) if any(_inside(user, operations) for user in users)]
            if len(holders) > 1:
                tied.append((elements, holders))
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
