"""Simulated annealing of an order: operations move along their device, most often operations of the critical path."""

import numpy as np
from numba import njit

from auto3d.synthesis.tables import Tables
from auto3d.synthesis.timing import Room, time_and_excess

TOGETHER = 0.2  # share of tries that move several operations


@njit(cache=True)
def seed_random(seed: int) -> None:
    """Start the random numbers of compiled code, which are not NumPy's."""
    np.random.seed(seed)


@njit(cache=True)
def _value(tables: Tables, order: np.ndarray, bounds: np.ndarray, room: Room, penalty: float) -> float:
    """The makespan, the price of an excess and, to lead off a plateau, a little of the times at which devices end."""
    time, excess = time_and_excess(tables, order, bounds, room)
    return time + 1e-3 / len(tables.free) * room.clock.sum() + penalty * excess if time < np.inf else np.inf


@njit(cache=True)
def anneal(
    tables: Tables,
    order: np.ndarray,
    bounds: np.ndarray,
    room: Room,
    best: np.ndarray,
    tries: int,
    hot: float,
    cold: float,
    penalty: float,
    reach: int,
) -> None:
    """Change ``order`` in ``tries`` tries, from temperature ``hot`` to ``cold``, and fill ``best`` with the best order.

    An operation moves by up to ``reach`` places on its device. In some tries, all operations of its kind and stage in a
    range of micro-batches move with it: that changes the steady state as a whole. Orders may exceed the memory on the
    way, at the price ``penalty`` of each unit; if none fits, ``best`` is the first order.
    """
    total = len(order)
    now = _value(tables, order, bounds, room, penalty)
    best_value = now if _fits(tables, room) else np.inf
    best[:] = order
    before = order.copy()
    path = np.zeros(total, np.int32)
    length = _critical(bounds, room, path)
    for attempt in range(tries):
        temperature = hot * (cold / hot) ** (attempt / tries)
        here = path[np.random.randint(length)] if length and np.random.random() < 0.7 else np.random.randint(total)
        d = np.searchsorted(bounds, here, side="right") - 1
        first, last = bounds[d], bounds[d + 1] - 1
        step = 1 + int(reach * np.random.random() ** 3)
        if np.random.random() < 0.5:
            step = -step
        there = min(max(here + step, first), last)
        if there == here or order[there] == order[here]:
            continue
        together = np.random.random() < TOGETHER
        if together:
            before[first : last + 1] = order[first : last + 1]
            _move_all(order, first, last, here, step, 1 + int(total / (last - first + 1) * np.random.random() * 8))
        else:
            _move(order, here, there)
        value = _value(tables, order, bounds, room, penalty)
        if value <= now or (value < np.inf and np.random.random() < np.exp((now - value) / temperature)):
            now = value
            length = _critical(bounds, room, path)
            if value < best_value and _fits(tables, room):
                best_value = value
                best[:] = order
        elif together:
            order[first : last + 1] = before[first : last + 1]
        else:
            _move(order, there, here)


@njit(cache=True)
def _fits(tables: Tables, room: Room) -> bool:
    """Whether no device holds more than its memory."""
    return bool(np.all(room.most <= tables.free))


@njit(cache=True)
def _move_all(order: np.ndarray, first: int, last: int, here: int, step: int, count: int) -> None:
    """Move the operation at ``here``, and up to ``count`` later operations of its kind and stage, by ``step`` each."""
    code = order[here]
    if step < 0:
        place = here
        while place <= last and count > 0:
            if order[place] == code:
                _move(order, place, max(first, place + step))
                count -= 1
            place += 1
        return
    end = here
    while end < last and count > 0:
        end += 1
        if order[end] == code:
            count -= 1
    for place in range(end, here - 1, -1):
        if order[place] == code:
            _move(order, place, min(last, place + step))


@njit(cache=True)
def _move(order: np.ndarray, here: int, there: int) -> None:
    """Move the operation at ``here`` to ``there``; operations between make room."""
    code = order[here]
    if there > here:
        for place in range(here, there):
            order[place] = order[place + 1]
    else:
        for place in range(here, there, -1):
            order[place] = order[place - 1]
    order[there] = code


@njit(cache=True)
def _critical(bounds: np.ndarray, room: Room, path: np.ndarray) -> int:
    """Fill ``path`` with the operations that the end of the last device waited for; returns how many they are."""
    last = -1
    for d in range(len(bounds) - 1):
        if bounds[d + 1] > bounds[d] and (last < 0 or room.end[bounds[d + 1] - 1] > room.end[last]):
            last = bounds[d + 1] - 1
    length = 0
    while last >= 0:
        path[length] = last
        length += 1
        last = room.cause[last]
    return length
