"""Repeated blocks among the tensors of a Graph: runs of operations that hold the same bytes at another place.

A run and the same run some periods later hold equal bytes if all that decides them is equal: what their operations
make, read, save and use, and how far away the last use of each tensor is. ``find_repeats`` compares all of it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from auto3d.cost.tensors import Tensors

_MOST_DISTANCES = 8  # how many possible periods are tried


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """The operations ``first`` to ``last`` - 1 repeat themselves every ``period`` operations.

    The memories from number ``own`` on belong to the first period, and their numbers grow by ``memories`` from period
    to period: with ``own`` 3 and ``memories`` 4, memory 5 of the first period is memory 9 of the second. All operations
    share the memories before ``own``.
    """

    first: int
    last: int
    period: int
    own: int
    memories: int


def find_repeats(tensors: Tensors) -> tuple[Repeats, ...]:
    """The repeated ranges of operations, of which no two overlap; the longest first."""
    columns = _columns(tensors)
    ranges = [repeats for distance in _distances(tensors) for repeats in _repeated_after(tensors, columns, distance)]
    kept: list[Repeats] = []
    for repeats in sorted(ranges, key=lambda repeats: (repeats.first - repeats.last, repeats.period)):
        if all(repeats.last <= other.first or other.last <= repeats.first for other in kept):
            kept.append(repeats)
    return tuple(kept)


def _distances(tensors: Tensors) -> list[int]:
    """Possible periods: the commonest distances between operations whose trained parameters have the same shapes."""
    shapes: dict[int, list[tuple[int, ...]]] = {}
    for position, number in zip(tensors.state_at.tolist(), tensors.state_of.tolist(), strict=True):
        shapes.setdefault(position, []).append(tensors.shapes[number])
    last: dict[tuple[tuple[int, ...], ...], int] = {}
    counts = Counter[int]()
    for position, parameter_shapes in shapes.items():
        if (before := last.get(tuple(parameter_shapes))) is not None:
            counts[position - before] += 1
        last[tuple(parameter_shapes)] = position
    return [distance for distance, count in counts.most_common(_MOST_DISTANCES) if count > 1]


def _repeated_after(tensors: Tensors, columns: np.ndarray, period: int) -> list[Repeats]:
    """The ranges in which each operation is the same as the operation ``period`` later."""
    ranges: list[Repeats] = []
    for home, stop in _runs((columns[:, :-period] == columns[:, period:]).all(axis=0), least=period):
        for begin, end in _runs(_same_makes(tensors, period, home, stop), home, least=period):
            ranges += _same_rows(tensors, period, begin, end)
    return ranges


def _columns(tensors: Tensors) -> np.ndarray:
    """[numbers of entries of each kind, and bytes; operations]: what equal operations have in common."""
    entries = ("use_at", "save_at", "read_at", "state_at", "deferred_at", "maker", "value_maker")
    counts = [np.bincount(at[at >= 0], minlength=tensors.count) for at in (getattr(tensors, name) for name in entries)]
    sizes = ("deferred_gradient", "extra", "forward_extra", "backward_extra", "slice_gradient", "joins")
    return np.stack([*counts, *(getattr(tensors, name) for name in sizes)])


def _same_makes(tensors: Tensors, period: int, home: int, stop: int) -> np.ndarray:
    """Per operation from ``home`` to ``stop`` - 1: whether what it makes is the same as ``period`` operations later."""
    same = np.ones(stop - home, dtype=bool)

    def later(positions: np.ndarray) -> np.ndarray:
        return np.where(positions < 0, -1, positions + period)

    memories, memories_later = _entries(tensors.maker, home, stop, period)
    equal = tensors.size[memories] == tensors.size[memories_later]
    equal &= tensors.repeated[memories] == tensors.repeated[memories_later]
    equal &= later(tensors.last_use[memories]) == tensors.last_use[memories_later]
    same[tensors.maker[memories][~equal] - home] = False
    values, values_later = _entries(tensors.value_maker, home, stop, period)
    equal = tensors.value_size[values] == tensors.value_size[values_later]
    equal &= later(tensors.last_read[values]) == tensors.last_read[values_later]
    same[tensors.value_maker[values][~equal] - home] = False
    last, least, most = np.full(tensors.count, -1), np.full(tensors.count, np.inf), np.full(tensors.count, -np.inf)
    views = tensors.views
    last[tensors.use_view[views]] = tensors.use_at[views]
    np.minimum.at(least, tensors.use_view[views], tensors.use_size[views])
    np.maximum.at(most, tensors.use_view[views], tensors.use_size[views])
    here, there = slice(home, stop), slice(home + period, stop + period)
    same &= (later(last[here]) == last[there]) & (least[here] == least[there]) & (most[here] == most[there])
    return same & (least[here] >= most[here])  # all uses of a view have its size


def _same_rows(tensors: Tensors, period: int, home: int, stop: int) -> list[Repeats]:
    """The ranges from ``home`` + ``period`` on in which each operation uses the same as ``period`` operations later."""
    own, own_later = np.searchsorted(tensors.maker, (home, home + period))
    own_value, own_value_later = np.searchsorted(tensors.value_maker, (home, home + period))
    first = home + period
    same = np.ones(stop - first, dtype=bool)

    def moved(numbers: np.ndarray, from_number: int, by: int) -> np.ndarray:
        return np.where(numbers >= from_number, numbers + by, numbers)

    def memories_later(memories: np.ndarray) -> np.ndarray:
        return moved(memories, own, own_later - own)

    def values_later(values: np.ndarray) -> np.ndarray:
        return moved(values, own_value, own_value_later - own_value)

    values, after = _entries(tensors.value_maker, first, stop, period)
    equal = memories_later(tensors.value_memory[values]) == tensors.value_memory[after]
    same[tensors.value_maker[values][~equal] - first] = False

    def compare(at: np.ndarray, *pairs: tuple[np.ndarray, np.ndarray]) -> None:
        """Compare entries of columns: (what they are one period later if they are the same, what they are)."""
        rows, rows_later = _entries(at, first, stop, period)
        for expected, column in pairs:
            same[at[rows][expected[rows] != column[rows_later]] - first] = False

    compare(
        tensors.use_at,
        (memories_later(tensors.use_of), tensors.use_of),
        (moved(tensors.use_view, home, period), tensors.use_view),
        (tensors.use_size, tensors.use_size),
    )
    compare(tensors.save_at, (memories_later(tensors.save_of), tensors.save_of))
    compare(tensors.deferred_at, (memories_later(tensors.deferred_of), tensors.deferred_of))
    compare(
        tensors.read_at, (values_later(tensors.read_of), tensors.read_of), (tensors.read_passes, tensors.read_passes)
    )
    numbers = {shape: number for number, shape in enumerate(dict.fromkeys(tensors.shapes))}
    shapes = np.array([numbers[shape] for shape in tensors.shapes], dtype=int)
    columns = (column[tensors.state_of] for column in (tensors.gradient, tensors.low_gradient, shapes))
    compare(tensors.state_at, *((column, column) for column in (*columns, tensors.state_deferred)))
    several, none = np.isin(tensors.state_of, list(tensors.several)), np.zeros(len(tensors.state_of), dtype=bool)
    compare(tensors.state_at, (several, none), (none, several))  # no parameter that other operations use, too
    ranges = []
    for begin, end in _runs(same, first, least=period):  # at least two periods, so that each operation is compared
        reads, _ = _entries(tensors.read_at, begin, end, period)
        members = np.union1d(np.arange(own_value, np.searchsorted(tensors.value_maker, end)), tensors.read_of[reads])
        if _is_bijection(tensors.value_class[members], tensors.value_class[values_later(members)]):
            memories = int(own_later - own)
            ranges.append(Repeats(first=begin, last=end + period, period=period, own=int(own), memories=memories))
    return ranges


def _entries(at: np.ndarray, first: int, stop: int, period: int) -> tuple[slice, slice]:
    """The entries whose positions in the sorted ``at`` are from ``first`` to ``stop`` - 1, and those a period later."""
    begin, end, later = np.searchsorted(at, (first, stop, first + period)).tolist()
    return slice(begin, end), slice(later, later + end - begin)


def _runs(same: np.ndarray, first: int = 0, *, least: int = 0) -> list[tuple[int, int]]:
    """The ranges of more than ``least`` consecutive True, where ``same[0]`` belongs to the position ``first``."""
    edges = (np.flatnonzero(np.diff(same, prepend=False, append=False)) + first).tolist()
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if end - begin > least]


def _is_bijection(here: Sequence[int] | np.ndarray, there: Sequence[int] | np.ndarray) -> bool:
    pairs = len(np.unique(np.stack([here, there]), axis=1).T)
    return pairs == len(np.unique(here)) == len(np.unique(there))
