"""An order with more or fewer micro-batches: its steady state, repeated or cut short."""

from collections.abc import Iterator

import numpy as np

from auto3d.synthesis.tables import Tables
from auto3d.synthesis.timing import make_room, makespan

PERIODS = (1, 2, 4, 8, 16, 32, 64)  # micro-batches of the part that is repeated
PLACES = 12  # times at which the part to repeat or to cut out may begin


def resized(tables: Tables, order: np.ndarray, bounds: np.ndarray, change: int) -> Iterator[np.ndarray]:
    """``order`` with ``change`` more micro-batches on each pipe (fewer below 0), in all the ways that are tried.

    On each device a part is repeated, or cut out, that has a number of micro-batches of each kind and stage: one of
    PERIODS that divides ``change``, or all of ``-change``. Parts begin at the same time on all devices. Nothing is
    yielded if no part has equal numbers: the order has no steady state. The orders may be too long for the memory.
    """
    room = make_room(tables, len(order))
    whole = makespan(tables, order, bounds, room)
    if not np.isfinite(whole):
        return
    tried = [-change] if change < 0 else [period for period in PERIODS if change % period == 0]
    for period in tried:
        for place in range(1, PLACES):
            longer = _resized(tables, order, bounds, room.end, change, whole * place / PLACES, period)
            if longer is not None:
                yield longer


def _resized(
    tables: Tables, order: np.ndarray, bounds: np.ndarray, end: np.ndarray, change: int, after: float, period: int
) -> np.ndarray | None:
    size = len(tables.device)
    devices = []
    for device in range(len(tables.free)):
        codes = order[bounds[device] : bounds[device + 1]]
        here = tables.exists & (tables.device == device)
        begin = int(np.searchsorted(end[bounds[device] : bounds[device + 1]], after, side="right"))
        part = codes[begin : begin + period * int(here.sum())]
        if (np.bincount(part, minlength=4 * size).reshape(4, size) != period * here).any():
            return None
        if change < 0:
            devices += [codes[:begin], codes[begin + len(part) :]]
        else:
            devices += [codes[:begin], np.tile(part, change // period), codes[begin:]]
    return np.concatenate(devices).astype(np.int32)
