"""The time of an order of operations, compiled: the same as ``auto3d.simulate.simulate`` finds, in microseconds."""

from typing import NamedTuple

import numpy as np
from numba import njit

from auto3d.synthesis.tables import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Tables


class Room(NamedTuple):
    """Arrays that a walk through an order fills; made once and used again."""

    end: np.ndarray  # per position of the order
    cause: np.ndarray  # per position: the position whose end it waited for; -1: none
    arrival: np.ndarray  # [2, Q, micro-batches] when the message of an F, or of a B or I, has arrived
    place: np.ndarray  # [2, Q, micro-batches] position of that operation
    done: np.ndarray  # [4, Q] operations that have run
    position: np.ndarray  # [D]
    clock: np.ndarray  # [D]
    held: np.ndarray  # [D]
    most: np.ndarray  # [D] the largest that it has held
    link_free: np.ndarray  # [links]
    last: np.ndarray  # [Q] position of its last operation
    synced: np.ndarray  # [Q] when its gradients are summed


def make_room(tables: Tables, operations: int) -> Room:
    """Arrays for orders of ``operations`` operations."""
    size, devices, micro_batches = len(tables.device), len(tables.free), int(tables.micro_batches.max())
    return Room(
        end=np.zeros(operations),
        cause=np.full(operations, -1, np.int32),
        arrival=np.zeros((2, size, micro_batches)),
        place=np.zeros((2, size, micro_batches), np.int32),
        done=np.zeros((4, size), np.int32),
        position=np.zeros(devices, np.int32),
        clock=np.zeros(devices),
        held=np.zeros(devices),
        most=np.zeros(devices),
        link_free=np.zeros(max(tables.links, 1)),
        last=np.zeros(size, np.int32),
        synced=np.zeros(size),
    )


@njit(cache=True)
def send(tables: Tables, room: Room, kind: int, q: int, now: float) -> tuple[float, float]:
    """When the message of an operation that ends at ``now`` has arrived, and when its device can go on."""
    after, link = tables.message[kind, q], tables.link[kind, q]
    if link < 0 or after <= 0.0:
        return now, now
    if not tables.overlap:
        return now, now + after
    room.link_free[link] = max(now, room.link_free[link]) + after
    return room.link_free[link], now


@njit(cache=True)
def makespan(tables: Tables, order: np.ndarray, bounds: np.ndarray, room: Room) -> float:
    """The makespan of ``order``; infinite if devices wait for each other, or if one would exceed its memory."""
    time, excess = time_and_excess(tables, order, bounds, room)
    return time if excess == 0.0 else np.inf


@njit(cache=True)
def time_and_excess(tables: Tables, order: np.ndarray, bounds: np.ndarray, room: Room) -> tuple[float, float]:
    """The makespan of ``order``, infinite if devices wait for each other, and what they hold beyond their memory.

    The excess is the sum over devices of their largest excesses.
    """
    excess = 0.0
    size, devices = len(tables.device), len(tables.free)
    done, position, clock, held = room.done, room.position, room.clock, room.held
    arrival, place, end, cause = room.arrival, room.place, room.end, room.cause
    done[:] = 0
    clock[:] = 0.0
    held[:] = 0.0
    room.most[:] = 0.0
    room.link_free[:] = 0.0
    for d in range(devices):
        position[d] = bounds[d]
    remaining = bounds[devices]
    moved = True
    while moved:
        moved = False
        for d in range(devices):
            here, stop, now = position[d], bounds[d + 1], clock[d]
            while here < stop:
                code = order[here]
                kind = code // size
                q = code - kind * size
                m = done[kind, q]
                begin, waited, receive = now, (here - 1 if here > bounds[d] else -1), 0.0
                if kind in (FORWARD, BACKWARD):
                    source = tables.before[q] if kind == FORWARD else tables.after[q]
                    if kind == BACKWARD:
                        recomputed = not tables.exists[RECOMPUTE, q] or done[RECOMPUTE, q] > m
                        if done[FORWARD, q] <= m or not recomputed:
                            return np.inf, 0.0
                    if source >= 0:
                        if done[kind, source] <= m:
                            break
                        if arrival[kind, source, m] > begin:
                            begin, waited = arrival[kind, source, m], place[kind, source, m]
                        if not tables.overlap and tables.link[kind, source] >= 0:
                            receive = tables.message[kind, source]
                elif done[BACKWARD if kind == WEIGHT else FORWARD, q] <= m:
                    return np.inf, 0.0
                room.most[d] = max(room.most[d], held[d] + tables.during[kind, q])
                held[d] += tables.later[kind, q]
                now = begin + receive + tables.duration[kind, q]
                end[here], cause[here] = now, waited
                if kind <= BACKWARD:
                    arrival[kind, q, m], now = send(tables, room, kind, q, now)
                    place[kind, q, m] = here
                done[kind, q] = m + 1
                room.last[q] = here
                here += 1
            if here > position[d]:
                remaining -= here - position[d]
                position[d], clock[d] = here, now
                moved = True
    if remaining:
        return np.inf, 0.0
    for d in range(devices):
        excess += max(0.0, room.most[d] - tables.free[d])
    return _with_updates(tables, room), excess


@njit(cache=True)
def _with_updates(tables: Tables, room: Room) -> float:
    """The makespan with lazy syncs and updates; ``room`` has the clocks of devices and the last operations of stages.

    A device sums the gradients of its stages one after the other, in the order of their last operations; a stage on
    several devices once all of them have begun.
    """
    size, devices = len(tables.device), len(tables.free)
    longest = 0.0
    for d in range(devices):
        longest = max(longest, room.clock[d])
        summed = room.clock[d]
        previous = -1
        for _ in range(size):  # the stages of d, by their last operations
            chosen = -1
            for q in range(size):
                later = tables.device[q] == d and room.last[q] > previous
                if later and (chosen < 0 or room.last[q] < room.last[chosen]):
                    chosen = q
            if chosen < 0:
                break
            previous = room.last[chosen]
            again = False  # whether a later pipe stage of this device is the same stage
            for q in range(size):
                if tables.device[q] == d and tables.stage[q] == tables.stage[chosen] and room.last[q] > previous:
                    again = True
            if not again:
                summed += tables.sync[chosen]
            room.synced[chosen] = summed
    for d in range(devices):
        begin, updates = room.clock[d], 0.0
        for q in range(size):
            if tables.device[q] == d:
                updates += tables.update[q]
                for other in range(size):
                    if tables.stage[other] == tables.stage[q]:
                        begin = max(begin, room.synced[other])
        longest = max(longest, begin + updates)
    return longest
