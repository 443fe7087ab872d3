"""The bytes of one run of operations during its forward and its backward, for one micro-batch.

The forward frees a value after its last use unless autograd saves it or a later run takes it. The backward goes from
the last operation to the first: at each operation, what earlier operations saved is alive, and the gradients of the
values that earlier operations made and later ones used. Autograd frees what an operation saved after its backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from auto3d.cost.tensors import Span, Tensors


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The largest number of bytes of an operation of the schedule, and the operation of the Graph that reaches it."""

    size: float
    position: int


@dataclass(frozen=True, kw_only=True)
class RunBytes:
    """Bytes of one micro-batch. What the segment takes from others does not count: it is alive all the time."""

    taken: frozenset[int]  # memories that it reads and does not make
    given: frozenset[int]  # memories that it makes and others use
    earlier: frozenset[int]  # memories of keys and values that it makes: the stage keeps them for later slices
    sent_copies: float  # bytes of messages that are no memories of its own: copies of views in another order
    saved: float  # bytes that stay from the forward until the backward; RunTensors has their tensors
    forward: Peak  # with everything that autograd saves
    dropping: Peak  # forward that saves nothing but ``earlier``
    again: Peak  # forward of a recomputation, which replaces ``earlier``
    backward: Peak  # all gradients of weights exist before it
    first_backward: Peak  # it makes the gradients of the private parameters, and counts them
    deferred: float  # bytes that a split backward keeps for its weight half: ``put_off``, and gradients of results
    weight_half: Peak
    private: float  # bytes of the gradients of parameters that no other segment uses
    slice_gradient: float  # gradients of the keys and values of a slice of the sequence, which later slices make

    def later(self, operations: int, memories: int, own: int) -> "RunBytes":
        """The same of operations that come so many later; the numbers of memories grow from number ``own`` on."""

        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Peak):
                changed[name] = replace(value, position=value.position + operations)
            elif isinstance(value, frozenset):
                changed[name] = frozenset(number + memories if number >= own else number for number in value)
        return replace(self, **changed)


@dataclass(frozen=True, kw_only=True)
class RunTensors:
    """What stays of one micro-batch from the forward until the backward, tensor by tensor."""

    positions: np.ndarray  # operations of the run
    extra: np.ndarray  # per operation: bytes that stay beside memories
    earlier: frozenset[int]  # the same as RunBytes.earlier
    held: np.ndarray  # memories that stay
    laid_out: tuple[np.ndarray, np.ndarray]  # (memory, bytes) of each copy that stays of a received view, in order
    put_off: np.ndarray  # memories that a split backward keeps for its weight half


def segment_of(
    tensors: Tensors, spans: Sequence[Span], *, shared: frozenset[int], split: bool
) -> tuple[RunBytes, RunTensors]:
    """The bytes of the operations in ``spans``, and the tensors that stay.

    Gradients of the parameters in ``shared`` exist all the time. With ``split``, backwards have a weight half.
    """
    places = _Places(tensors.count, spans)
    length = places.length
    memories, values = len(tensors.size), len(tensors.value_size)

    used_at, used = places.select(tensors.use_at, tensors.use_of)
    saved_at, saved = places.select(tensors.save_at, tensors.save_of)
    last_use = _last(used, used_at, memories)
    first_save = np.full(memories, length)
    first_save[saved[::-1]] = saved_at[::-1]
    made = places.of(tensors.maker)
    again = tensors.repeated & (tensors.maker >= 0) & (last_use >= 0)  # made where it is first used
    first_use = np.full(memories, length)
    first_use[used[::-1]] = used_at[::-1]
    made = np.where(again, first_use, made)
    inside = (made >= 0) & (again | ~tensors.repeated)
    is_given = inside & ~again & places.after(tensors.last_use)
    size = tensors.size[inside]
    start, is_saved, goes_on = made[inside], (first_save < length)[inside], is_given[inside]
    end = np.maximum(np.maximum(start, last_use[inside]) + 1, 0)
    views, view_sizes = places.rows(tensors.use_at, tensors.use_view), places.rows(tensors.use_at, tensors.use_size)
    # A part of a memory has gaps between its elements: the receiver takes it as it comes.
    is_whole = view_sizes == tensors.size[used]
    laid_out = (views >= 0) & (places.of(views) < 0) & (first_save[used] < length) & is_whole
    first_rows = np.unique(views[laid_out], return_index=True)[1]
    copies = used[laid_out][first_rows], view_sizes[laid_out][first_rows]
    copied = float(copies[1].sum())
    views, used_later = tensors.use_view[tensors.views], places.of(tensors.use_at[tensors.views]) < 0
    sent = (places.of(views) >= 0) & used_later
    sent_copies = _sum_of_distinct(views[sent], tensors.use_size[tensors.views][sent])
    own = np.cumsum(tensors.extra[places.positions])
    temporary = tensors.forward_extra[places.positions]

    def alive(stop: np.ndarray) -> np.ndarray:
        return np.cumsum(_add(start, size, length) - _add(stop, size, length))

    stays = is_saved | goes_on
    joins = tensors.joins[places.positions][used_at]
    last_join = _last(used[joins], used_at[joins], memories)[inside]
    is_earlier = stays & (last_join >= 0)
    forward = alive(np.where(stays, length, end)) + own + temporary
    dropping = alive(np.where(goes_on | is_earlier, length, end)) + temporary
    replaced = is_earlier & ~goes_on
    again = forward + copied - np.cumsum(_add(last_join[replaced], size[replaced], length))
    forward, own = forward + copied, own + copied
    held = size[stays].sum() + (own[-1] if length else 0.0)

    backward = own + size[goes_on].sum()
    backward = backward + np.cumsum(_add(first_save[inside], np.where(goes_on, 0.0, size), length))
    backward = backward + tensors.backward_extra[places.positions]
    backward = backward + _gradients(tensors, places, is_given, values)
    users_at, users = places.select(tensors.state_at, tensors.state_of)
    is_deferred = places.rows(tensors.state_at, tensors.state_deferred)
    deferred = weights = 0.0
    put_off = np.zeros(memories, dtype=bool)
    if split:
        kept = places.rows(tensors.deferred_at, tensors.deferred_of)
        put_off[kept] = True
        later = np.where(put_off & inside & ~is_given & (first_save < length), tensors.size, 0.0)
        # They stay saved although the backward of their operation is over.
        backward = backward + later.sum() - np.cumsum(_add(first_save, later, length))
        gradients = tensors.deferred_gradient[places.positions]
        backward = backward + gradients.sum() - np.cumsum(gradients)
        deferred = float(tensors.size[put_off].sum() + gradients.sum())
        low = tensors.low_gradient[users[is_deferred]]
        weights = float((np.where(low > 0, low + tensors.gradient[users[is_deferred]], 0.0)).max(initial=0.0))
        users_at, users = users_at[~is_deferred], users[~is_deferred]
    whole = tensors.gradient
    backward = backward + _add(users_at, (whole + tensors.low_gradient)[users], length)
    first_user, last_user = np.full(len(whole), length), _last(users, users_at, len(whole))
    first_user[users[::-1]] = users_at[::-1]
    several = np.flatnonzero(last_user > first_user)
    # Autograd adds up the gradients of all uses of a parameter, then adds the sum to earlier micro-batches' gradient.
    backward = backward + np.cumsum(
        _add(first_user[several], whole[several], length) - _add(last_user[several], whole[several], length)
    )
    mine = np.unique(tensors.state_of[places.rows(tensors.state_at, np.arange(len(tensors.state_at)))])
    private = np.array([number for number in mine.tolist() if number not in shared], dtype=int)
    made_at = np.minimum(first_user[private], length)  # place ``length``: a weight half makes them
    exist = np.cumsum(_add(made_at, whole[private], length)[::-1])[::-1] if length else own
    growing = np.concatenate([exist[1:], [0.0]]) if length else exist
    earlier = frozenset(np.flatnonzero(inside)[is_earlier].tolist())
    run_bytes = RunBytes(
        taken=frozenset(np.flatnonzero((last_use >= 0) & ~inside).tolist()),
        given=frozenset(np.flatnonzero(is_given).tolist()),
        earlier=earlier,
        sent_copies=sent_copies,
        saved=float(held),
        forward=places.peak(forward),
        dropping=places.peak(dropping),
        again=places.peak(again),
        backward=places.peak(backward),
        first_backward=places.peak(backward + growing),
        deferred=deferred,
        weight_half=Peak(size=weights, position=int(places.positions[0]) if length else 0),
        private=float(whole[private].sum()),
        slice_gradient=float(tensors.slice_gradient[places.positions].sum()),
    )
    return run_bytes, RunTensors(
        positions=places.positions,
        extra=tensors.extra[places.positions],
        earlier=earlier,
        held=np.flatnonzero(inside)[stays],
        laid_out=copies,
        put_off=np.flatnonzero(put_off),
    )


def _gradients(tensors: Tensors, places: "_Places", is_given: np.ndarray, values: int) -> np.ndarray:
    """Bytes of gradients of values at each operation of the backward, after it and before it frees its own."""
    length = places.length
    read_at, read = places.select(tensors.read_at, tensors.read_of)
    passes = places.rows(tensors.read_at, tensors.read_passes)
    last_read = _last(read, read_at, values)
    made = places.of(tensors.value_maker)
    given = (made >= 0) & is_given[tensors.value_memory] & places.after(tensors.last_read)
    members = np.flatnonzero((made >= 0) | (last_read >= 0))
    classes = tensors.value_class[members]
    numbers = int(tensors.value_class.max(initial=-1)) + 1
    first, last, size = np.full(numbers, length), np.full(numbers, -1), np.zeros(numbers)
    np.minimum.at(first, classes, np.maximum(made[members], 0))
    np.maximum.at(last, classes, np.maximum(last_read[members], made[members]))
    np.maximum.at(size, classes, tensors.value_size[members])
    later = (last_read[read] > read_at) | given[read]
    added = ~passes & later  # gradients that are added to others, which exist
    adds_at, adds = read_at[added], read[added]
    # The executor holds the gradients of values that the segment gave; a first addition makes another tensor.
    of_given = np.unique(tensors.value_class[given])
    separate = np.full(numbers, -1)
    np.maximum.at(separate, tensors.value_class[adds], adds_at)
    last[of_given] = np.minimum(last[of_given], separate[of_given])
    kept = (last >= first) & (size > 0)
    total = np.cumsum(_add(first[kept], size[kept], length) - _add(last[kept] + 1, size[kept], length))
    return total + _add(adds_at, tensors.value_size[adds], length) + tensors.value_size[given].sum()


class _Places:
    """The operations of a segment, numbered from 0."""

    def __init__(self, count: int, spans: Sequence[Span]) -> None:
        self._spans = spans
        self.positions = np.concatenate([np.arange(first, last) for first, last in spans])
        self.length = len(self.positions)
        self._number = None
        if len(spans) > 1:
            self._number = np.full(count + 1, -1)  # the last entry is for position -1
            self._number[self.positions] = np.arange(self.length)

    def of(self, positions: np.ndarray) -> np.ndarray:
        """The number of the operation at each of ``positions``; -1 for a position that is not in the segment."""
        if self._number is not None:
            return self._number[positions]
        first, last = self._spans[0]
        return np.where((positions >= first) & (positions < last), positions - first, -1)

    def rows(self, at: np.ndarray, column: np.ndarray) -> np.ndarray:
        """The entries of ``column`` whose position, in the sorted ``at``, is in the segment."""
        bounds = [np.searchsorted(at, span) for span in self._spans]
        if len(bounds) == 1:
            return column[bounds[0][0] : bounds[0][1]]
        return np.concatenate([column[first:last] for first, last in bounds])

    def select(self, at: np.ndarray, column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(number of the operation, entry of ``column``) of each pair in the segment."""
        return self.of(self.rows(at, at)), self.rows(at, column)

    def after(self, positions: np.ndarray) -> np.ndarray:
        """Whether each of ``positions`` comes after the segment has begun and is not in it."""
        return (positions >= self._spans[0][0]) & (self.of(positions) < 0)

    def peak(self, sizes: np.ndarray) -> Peak:
        """The largest of ``sizes``, one per operation."""
        place = int(sizes.argmax()) if self.length else 0
        return Peak(size=float(sizes[place]), position=int(self.positions[place]))


def _sum_of_distinct(keys: np.ndarray, sizes: np.ndarray) -> float:
    """The sum of ``sizes``, each key once: keys 7, 7, 9 with sizes 2, 2, 5 have 7 bytes."""
    return float(sizes[np.unique(keys, return_index=True)[1]].sum())


def _last(numbers: np.ndarray, at: np.ndarray, count: int) -> np.ndarray:
    """The last place at which each of ``count`` numbers occurs in pairs that are ordered by place; -1 if never.

    Numbers 1, 0, 1 at places 3, 4, 6, of 3 numbers: 4, 6, -1.
    """
    last = np.full(count, -1)
    last[numbers] = at
    return last


def _add(places: np.ndarray, sizes: np.ndarray, length: int) -> np.ndarray:
    """Per operation, the sum of ``sizes`` at its place; sizes at ``length`` are left out.

    Sizes 5, 1, 2, 9 at places 0, 2, 2, 3 of 3 operations: 5, 0, 3.
    """
    return np.bincount(places, sizes, minlength=length + 1)[:length]
