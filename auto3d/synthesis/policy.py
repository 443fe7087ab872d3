"""Orders by list scheduling: each device runs, of what is ready, what a policy puts first."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
from numba import njit

from auto3d.synthesis.tables import BACKWARD, FORWARD, RECOMPUTE, Tables
from auto3d.synthesis.timing import Room, send

NO_LIMIT = 1e6


class Policy(NamedTuple):
    """What a device runs next, if several operations are ready."""

    priority: np.ndarray  # [4, Q] the operation with the highest priority runs first
    limit: np.ndarray  # [Q] most micro-batches between the start of F and the end of B or I
    patience: np.ndarray  # [D] time that a device waits for an operation of higher priority whose message is on its way


@njit(cache=True)
def list_schedule(tables: Tables, policy: Policy, bounds: np.ndarray, room: Room, order: np.ndarray) -> bool:
    """Fill ``order`` by ``policy``; False if devices come to a halt, since memory or a limit forbids all that is ready.

    Devices decide in the order of time, so that none decides by what happens later, but for messages on their way.
    """
    size, devices = len(tables.device), len(tables.free)
    done, position, clock, held, arrival = room.done, room.position, room.clock, room.held, room.arrival
    done[:] = 0
    clock[:] = 0.0
    held[:] = 0.0
    room.link_free[:] = 0.0
    for d in range(devices):
        position[d] = bounds[d]
    next_code = np.full(devices, -1, np.int32)
    next_begin = np.full(devices, np.inf)
    stale = np.ones(devices, np.bool_)
    for _ in range(bounds[devices]):
        chosen = -1
        for d in range(devices):
            if stale[d]:
                stale[d] = False
                next_code[d], next_begin[d] = _next(tables, policy, room, d)
            if next_code[d] >= 0 and (chosen < 0 or next_begin[d] < next_begin[chosen]):
                chosen = d
        if chosen < 0:
            return False
        code = next_code[chosen]
        kind = code // size
        q = code - kind * size
        m = done[kind, q]
        held[chosen] += tables.later[kind, q]
        now = next_begin[chosen] + tables.duration[kind, q]
        if not tables.overlap and kind <= BACKWARD:
            source = tables.before[q] if kind == FORWARD else tables.after[q]
            if source >= 0 and tables.link[kind, source] >= 0:
                now += tables.message[kind, source]
        if kind <= BACKWARD:
            arrival[kind, q, m], now = send(tables, room, kind, q, now)
            if kind == FORWARD:
                for other in range(size):
                    if tables.before[other] == q:
                        stale[tables.device[other]] = True
            elif tables.before[q] >= 0:
                stale[tables.device[tables.before[q]]] = True
        done[kind, q] = m + 1
        order[position[chosen]] = code
        position[chosen] += 1
        clock[chosen] = now
        stale[chosen] = True
    return True


@njit(cache=True)
def _next(tables: Tables, policy: Policy, room: Room, d: int) -> tuple[int, float]:
    """The code of the operation that device ``d`` runs next, and when; (-1, infinite) if nothing is ready or coming."""
    size = len(tables.device)
    done, arrival, now = room.done, room.arrival, room.clock[d]
    earliest = np.inf
    best, best_begin, best_priority = -1, np.inf, -np.inf
    for turn in range(2):  # first the earliest time at which anything can run, then the operation
        for q in range(size):
            if tables.device[q] != d:
                continue
            for kind in range(4):
                m = done[kind, q]
                if not tables.exists[kind, q] or m >= tables.micro_batches[q]:
                    continue
                begin, priority = now, policy.priority[kind, q]
                if kind == FORWARD:
                    if m - done[BACKWARD, q] >= policy.limit[q]:
                        continue
                    source = tables.before[q]
                    if source >= 0:
                        if done[FORWARD, source] <= m:
                            continue
                        begin = max(begin, arrival[FORWARD, source, m])
                elif kind in (BACKWARD, RECOMPUTE):
                    if done[FORWARD, q] <= m:
                        continue
                    if kind == BACKWARD:
                        if tables.exists[RECOMPUTE, q] and done[RECOMPUTE, q] <= m:
                            continue
                    elif m > done[BACKWARD, q]:
                        continue  # it recomputes one micro-batch ahead
                    source = tables.after[q]
                    if source >= 0:
                        known = done[BACKWARD, source] > m
                        if kind == BACKWARD:
                            if not known:
                                continue
                            begin = max(begin, arrival[BACKWARD, source, m])
                        elif known and arrival[BACKWARD, source, m] <= now + tables.duration[RECOMPUTE, q]:
                            priority = policy.priority[BACKWARD, q]
                    elif kind == RECOMPUTE:
                        priority = policy.priority[BACKWARD, q]
                elif done[BACKWARD, q] <= m:
                    continue
                needed = tables.during[kind, q]
                if kind == FORWARD:
                    needed = tables.needed[q]
                if needed > 0.0 and room.held[d] + needed > tables.free[d]:
                    continue
                if turn == 0:
                    earliest = min(earliest, begin)
                elif begin <= earliest + policy.patience[d] and priority > best_priority:
                    best, best_begin, best_priority = kind * size + q, begin, priority
    return best, best_begin


def usual_policies(tables: Tables) -> Iterator[Policy]:
    """Policies that differ in the kind that comes first, the micro-batches in flight, and how long a device waits.

    Limits are multiples of the micro-batches that a stage needs in flight to be busy all the time: the time from a
    micro-batch's F to the end of its B or I, divided by the work of the busiest device for one micro-batch.
    """
    size, devices = len(tables.device), len(tables.free)
    work = np.bincount(tables.device, weights=np.where(tables.exists, tables.duration, 0.0).sum(0), minlength=devices)
    needed = _round_trips(tables) / max(work.max(), 1e-30)
    patience = tables.duration[FORWARD].min() / 2
    firsts = ((2.0, 3.0, 1.0, 1.5), (3.0, 2.0, 1.0, 1.5), (2.0, 3.0, 2.5, 1.5))  # priorities of F, B or I, W, R
    pipes = (0.0,) if tables.pipe.max() == 0 else (0.0, 0.5, -0.5)
    for first, deeper, factor, waits, pipe in product(firsts, (0.01, -0.01), (1.0, 1.5, 2.0, NO_LIMIT), (0, 1), pipes):
        priority = np.repeat(np.array(first)[:, None], size, axis=1)
        priority[: BACKWARD + 1] += deeper * tables.stage  # among equal kinds, a later or an earlier stage comes first
        priority += pipe * tables.pipe
        limit = np.minimum(np.ceil(factor * needed), NO_LIMIT)
        yield Policy(priority, limit, np.full(devices, waits * patience))


def changed_policy(policy: Policy, random: np.random.Generator) -> Policy:
    """``policy`` with a random change of one limit, priority or patience."""
    priority, limit, patience = policy.priority.copy(), policy.limit.copy(), policy.patience.copy()
    what, stage = random.integers(4), random.integers(len(limit))
    if what <= 1:
        limit[stage] = max(1, (limit[stage] if limit[stage] < NO_LIMIT else 8) + random.choice((-2, -1, 1, 2)))
    elif what == 2:
        priority[random.integers(4), stage] += random.normal()
    else:
        device = random.integers(len(patience))
        patience[device] = max(0.0, patience[device] + random.normal() * max(policy.patience.max(), 1e-3))
    return Policy(priority, limit, patience)


def _round_trips(tables: Tables) -> np.ndarray:
    """Per pipe stage, the time from the start of a micro-batch's F to the end of its B or I if nothing else runs."""
    times = np.zeros(len(tables.device))
    for index in np.argsort(-tables.stage):
        times[index] = tables.duration[: BACKWARD + 1, index].sum()
        if tables.after[index] >= 0:
            times[index] += times[tables.after[index]] + tables.message[FORWARD, index]
            times[index] += tables.message[BACKWARD, tables.after[index]]
    return times
