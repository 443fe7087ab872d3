"""Simulated annealing of an order: operations move along their device, most often those on the critical path."""

import numpy as np
from numba import njit

from auto3d.synthesis.timing import makespan


@njit(cache=True)
def seed_random(seed):
    """Start the random numbers of compiled code, which are not NumPy's."""
    np.random.seed(seed)


@njit(cache=True)
def _value(tables, order, bounds, room, weight):
    """The makespan, and a little of the times at which devices end, so that there is a way down on a plateau."""
    time = makespan(tables, order, bounds, room)
    return time + weight * room.clock.sum() if time < np.inf else np.inf


@njit(cache=True)
def anneal(tables, order, bounds, room, best, tries, hot, cold, reach):
    """Change ``order`` in ``tries`` tries, at temperatures that fall from ``hot`` to ``cold``; returns the best makespan.

    ``best`` holds that order afterwards. An operation moves by up to ``reach`` places.
    """
    devices, total = len(tables.free), len(order)
    weight = 1e-3 / devices
    now = _value(tables, order, bounds, room, weight)
    best[:] = order
    best_value, best_time = now, makespan(tables, order, bounds, room)
    path = np.zeros(total, np.int32)
    length = _critical(bounds, room, path)
    for attempt in range(tries):
        temperature = hot * (cold / hot) ** (attempt / tries)
        here = path[np.random.randint(length)] if length and np.random.random() < 0.7 else np.random.randint(total)
        d = np.searchsorted(bounds, here, side="right") - 1
        step = 1 + int(reach * np.random.random() ** 3)
        there = here - step if np.random.random() < 0.5 else here + step
        there = min(max(there, bounds[d]), bounds[d + 1] - 1)
        code = order[here]
        if there == here or order[there] == code:
            continue
        _move(order, here, there)
        value = _value(tables, order, bounds, room, weight)
        if value <= now or (value < np.inf and np.random.random() < np.exp((now - value) / temperature)):
            now = value
            length = _critical(bounds, room, path)
            if value < best_value:
                best_value = value
                best[:] = order
        else:
            _move(order, there, here)
    best_time = makespan(tables, best, bounds, room)
    return best_time


@njit(cache=True)
def _move(order, here, there):
    """Move the operation at ``here`` to ``there``; those between make room."""
    code = order[here]
    if there > here:
        for place in range(here, there):
            order[place] = order[place + 1]
    else:
        for place in range(here, there, -1):
            order[place] = order[place - 1]
    order[there] = code


@njit(cache=True)
def _critical(bounds, room, path):
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
