"""The bytes of runs of operations of one Graph, each kind of run counted once."""

from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np

from auto3d.cost.memory.repeats import Repeats, find_repeats
from auto3d.cost.memory.segment import RunBytes, segment_of
from auto3d.cost.tensors import Span, Tensors


class Segments:
    """The runs of operations of ``tensors``. Runs of repeated blocks that are alike are counted once."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self._count = cache(lambda spans, shared, split: segment_of(tensors, spans, shared=shared, split=split)[0])

    @cached_property
    def _repeats(self) -> tuple[Repeats, ...]:
        return find_repeats(self.tensors)

    def repeat_of(self, spans: Sequence[Span]) -> tuple[Repeats, int] | None:
        """The range of repeated operations in which ``spans`` lie, and the number of periods before them there.

        None if they do not lie in one range.
        """
        for repeats in self._repeats:
            if spans and repeats.first <= spans[0][0] and spans[-1][1] <= repeats.last:
                return repeats, (spans[0][0] - repeats.first) // repeats.period
        return None

    def of(self, spans: Sequence[Span], *, shared: frozenset[int], split: bool) -> RunBytes:
        """The bytes of the operations in ``spans``, as ``segment_of`` counts them."""
        repeated = self.repeat_of(spans)
        if repeated is None:
            return self._count(tuple(spans), shared, split)
        repeats, periods = repeated
        here = self._count(earlier(spans, by := periods * repeats.period), frozenset(), split)
        return here.later(by, periods * repeats.memories, repeats.own) if periods else here

    def used_outside(self, spans: Sequence[Span]) -> frozenset[int]:
        """The trained parameters that several operations use, one of them outside of ``spans``."""
        return frozenset(
            number
            for number, positions in self._several.items()
            if not all(any(first <= position < last for first, last in spans) for position in positions)
        )

    def saved_from(self, span: Span) -> np.ndarray:
        """[operations + 1]: at least the bytes that are saved from each operation of ``span`` to its end."""
        tensors, (first, last) = self.tensors, span
        begin, end = np.searchsorted(tensors.maker, span)
        stays = (self._first_save[begin:end] < last) | (tensors.last_use[begin:end] >= last)
        stays &= ~tensors.repeated[begin:end]
        made = np.bincount(
            tensors.maker[begin:end][stays] - first, tensors.size[begin:end][stays], minlength=last - first
        )
        return np.append(np.cumsum((made + tensors.extra[first:last])[::-1])[::-1], 0.0)

    @cached_property
    def _first_save(self) -> np.ndarray:
        """Position of the first operation that saves each memory; behind the last operation if none does."""
        tensors = self.tensors
        first = np.full(len(tensors.size), tensors.count)
        first[tensors.save_of[::-1]] = tensors.save_at[::-1]
        return first

    @cached_property
    def _several(self) -> dict[int, list[int]]:
        """Trained parameter that several operations use -> their positions."""
        tensors = self.tensors
        return {number: tensors.state_at[tensors.state_of == number].tolist() for number in sorted(tensors.several)}


def earlier(spans: Sequence[Span], by: int) -> tuple[Span, ...]:
    """``spans``, ``by`` operations earlier."""
    return tuple((first - by, last - by) for first, last in spans)
