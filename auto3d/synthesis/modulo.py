"""Orders by modulo scheduling: all micro-batches run by one pattern of start times, each one period after the last.

Software pipelining of loops (Rau 1994, "Iterative modulo scheduling") starts the operations of one iteration such that
no two of them meet when that is repeated with a period. Qi et al. 2024, "Pipeline parallelism with controllable
memory", section 3, make schedules from such a pattern, their building block, by hand and for equal times: what a device
holds is the life time of its activations divided by the period. Here the pattern is sought, for given times, messages
and memory, in time that does not depend on the number of micro-batches.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from auto3d.synthesis.tables import BACKWARD, FORWARD, RECOMPUTE, TINY, WEIGHT, Tables

HOT, COLD = 0.3, 0.003  # first and last temperature of annealing, in least periods
PENALTY = 3.0  # price of holding twice the memory, in makespans
RAMP = 0.5  # share of the time from the first F to the last B or I that warm-up and drain take beside the periods
LONGEST = 1.3  # first period, in least periods
SHORTEST = 1e-6  # share of the longest operation that the others take at least
ROUNDING = 1e-9  # share of a period by which operations may seem to meet


class ModuloPattern(NamedTuple):
    """When the operations of one micro-batch of each pipe start, and the time until the next micro-batches' start."""

    period: float
    delay: np.ndarray  # [4, Q] how much later than possible each operation was allowed to start
    start: np.ndarray  # [4, Q]


class _Devices(NamedTuple):
    """The operations that are placed on each device."""

    start: np.ndarray  # [D, operations]
    length: np.ndarray  # [D, operations]
    code: np.ndarray  # [D, operations]
    placed: np.ndarray  # [D] how many of them have their time


def first_pattern(tables: Tables) -> ModuloPattern:
    """Every operation as early as it can, but no two at a time; the period is longer than it has to be."""
    nothing = np.zeros(tables.duration.shape)
    return ModuloPattern(LONGEST * least_period(tables), nothing, nothing.copy())


@njit(cache=True)
def least_period(tables: Tables) -> float:
    """The time that the busiest device works on one micro-batch of each pipe."""
    lengths, work = _lengths(tables), np.zeros(len(tables.free))
    for q in range(len(tables.device)):
        work[tables.device[q]] += lengths[:, q].sum()
    return work.max()


@njit(cache=True)
def better_pattern(tables: Tables, pattern: ModuloPattern, tries: int) -> tuple[bool, ModuloPattern]:
    """Whether a pattern was found that fits the memory, and the best: ``pattern`` after ``tries`` tries of annealing.

    The period and the delays change; operations are then placed one after the other, each as early as its delay and the
    operations before it admit. Patterns may exceed the memory on the way, at a price.
    """
    size, least, chain, lengths = len(tables.device), least_period(tables), _chain(tables), _lengths(tables)
    micro_batches, room = tables.micro_batches.max(), _devices(tables, len(chain))
    period, delay, start = pattern.period, pattern.delay.copy(), pattern.start.copy()
    now, best = _price(tables, chain, lengths, micro_batches, period, delay, start, room)[0], np.inf
    best_period, best_delay = period, delay.copy()
    for attempt in range(tries):
        temperature = HOT * least * (COLD / HOT) ** (attempt / tries)
        old_period, code, dice = period, chain[np.random.randint(len(chain))], np.random.random()
        kind, q = code // size, code % size
        old_delay = delay[kind, q]
        if dice < 0.15:
            period = max(least, period * (1.0 + 0.03 * np.random.randn() * np.random.random()))
        elif dice < 0.5:
            delay[kind, q] = 0.0
        elif dice < 0.75:
            delay[kind, q] = period * np.random.random() * np.random.random()
        else:
            delay[kind, q] = max(0.0, old_delay + 0.1 * period * np.random.randn())
        price, fits = _price(tables, chain, lengths, micro_batches, period, delay, start, room)
        if price <= now or (price < np.inf and np.random.random() < np.exp((now - price) / temperature)):
            now = price
            if fits and price < best:
                best, best_period = price, period
                best_delay[:] = delay
        else:
            period, delay[kind, q] = old_period, old_delay
    _price(tables, chain, lengths, micro_batches, best_period, best_delay, start, room)
    return best < np.inf, ModuloPattern(best_period, best_delay, start)


def order_by_pattern(tables: Tables, pattern: ModuloPattern) -> np.ndarray:
    """The order in which all micro-batches run by ``pattern``."""
    chain, size = _chain(tables), len(tables.device)
    devices = []
    for device in range(len(tables.free)):
        codes = chain[tables.device[chain % size] == device]
        counts = tables.micro_batches[codes % size]
        number = np.concatenate([np.arange(count) for count in counts])
        starts = np.repeat(pattern.start.flat[codes], counts) + pattern.period * number
        devices.append(np.repeat(codes, counts)[np.argsort(starts)])
    return np.concatenate(devices)


@njit(cache=True)
def _chain(tables: Tables) -> np.ndarray:
    """The codes (kind × Q + pipe stage) of one micro-batch of each pipe, after the codes they wait for; W last."""
    size = len(tables.device)
    forward = np.arange(size) + FORWARD * size  # pipe stages are in the order of their stages
    backward = np.zeros(3 * size, np.int32)
    count = 0
    for q in range(size - 1, -1, -1):
        for kind in (RECOMPUTE, BACKWARD):
            if tables.exists[kind, q]:
                backward[count] = kind * size + q
                count += 1
    for q in range(size - 1, -1, -1):
        if tables.exists[WEIGHT, q]:
            backward[count] = WEIGHT * size + q
            count += 1
    return np.concatenate((forward.astype(np.int32), backward[:count]))


@njit(cache=True)
def _lengths(tables: Tables) -> np.ndarray:
    """[4, Q] How long each operation occupies its device: with its messages, unless they overlap with compute.

    None takes less than SHORTEST of the longest: no two of a device start at once, so what it holds is certain.
    """
    shortest = max(SHORTEST * np.where(tables.exists, tables.duration, 0.0).max(), TINY)
    lengths = np.where(tables.exists, np.maximum(tables.duration, shortest), 0.0)
    if not tables.overlap:
        for q in range(len(tables.device)):
            for kind in (FORWARD, BACKWARD):
                source = tables.before[q] if kind == FORWARD else tables.after[q]
                lengths[kind, q] += tables.message[kind, q]
                if source >= 0:
                    lengths[kind, q] += tables.message[kind, source]
    return lengths


@njit(cache=True)
def _devices(tables: Tables, operations: int) -> _Devices:
    devices = len(tables.free)
    return _Devices(
        np.zeros((devices, operations)),
        np.zeros((devices, operations)),
        np.zeros((devices, operations), np.int32),
        np.zeros(devices, np.int32),
    )


@njit(cache=True)
def _price(
    tables: Tables,
    chain: np.ndarray,
    lengths: np.ndarray,
    micro_batches: int,
    period: float,
    delay: np.ndarray,
    start: np.ndarray,
    devices: _Devices,
) -> tuple[float, bool]:
    """About the makespan, with the price of an excess of memory, and whether there is none; fills ``start``.

    Infinite if the operations of a device do not fit into the period.
    """
    size, end = len(tables.device), 0.0
    devices.placed[:] = 0
    for code in chain:
        kind, q = code // size, code % size
        d = tables.device[q]
        time = _next_gap(devices, d, period, _ready(tables, lengths, start, kind, q) + delay[kind, q], lengths[kind, q])
        if time == np.inf:
            return np.inf, False
        start[kind, q] = time
        place = devices.placed[d]
        devices.start[d, place], devices.length[d, place], devices.code[d, place] = time, lengths[kind, q], code
        devices.placed[d] += 1
        if kind == BACKWARD:
            end = max(end, time + lengths[kind, q])
    excess = 0.0
    for d in range(len(tables.free)):
        excess += max(0.0, _peak(tables, devices, d, period) / max(tables.free[d], TINY) - 1.0)
    return micro_batches * period * (1.0 + PENALTY * excess) + RAMP * end, excess == 0.0


@njit(cache=True)
def _ready(tables: Tables, lengths: np.ndarray, start: np.ndarray, kind: int, q: int) -> float:
    """When what an operation waits for has ended, and its message has arrived."""
    if kind == WEIGHT:
        return start[BACKWARD, q] + lengths[BACKWARD, q]
    source = tables.before[q] if kind == FORWARD else tables.after[q]
    along = FORWARD if kind == FORWARD else BACKWARD
    ready = 0.0
    if source >= 0:
        ready = start[along, source] + lengths[along, source]
        if tables.overlap:
            ready += tables.message[along, source]
    if kind == RECOMPUTE:  # while the message comes that B or I waits for
        ready -= lengths[RECOMPUTE, q]
    if kind != FORWARD:
        ready = max(ready, start[FORWARD, q] + lengths[FORWARD, q])
    if kind == BACKWARD and tables.exists[RECOMPUTE, q]:
        ready = max(ready, start[RECOMPUTE, q] + lengths[RECOMPUTE, q])
    return ready


@njit(cache=True)
def _next_gap(devices: _Devices, d: int, period: float, ready: float, length: float) -> float:
    """The earliest time from ``ready`` at which device ``d`` has a gap of ``length`` in every period; else infinite."""
    time, apart, here, placed, rounding = ready, 0, 0, devices.placed[d], ROUNDING * period
    for _ in range(2 * placed * (placed + 1)):  # each operation is in the way once, and once more in the next period
        if apart == placed or time > ready + period:
            break
        since, there = (time - devices.start[d, here]) % period, devices.length[d, here]
        if since < there - rounding:
            time += there - since
            apart = 0
        elif period - since < length - rounding:
            time += period - since + there
            apart = 0
        else:
            apart += 1
        here = (here + 1) % placed
    return time if apart == placed and time <= ready + period else np.inf


@njit(cache=True)
def _peak(tables: Tables, devices: _Devices, d: int, period: float) -> float:
    """The most that device ``d`` holds in the steady state."""
    size, most = len(tables.device), 0.0
    for i in range(devices.placed[d]):
        code = devices.code[d, i]
        held = tables.during[code // size, code % size]
        if held <= 0.0:
            continue
        for j in range(devices.placed[d]):
            if i != j:  # the changes of a stage add up to 0, so only differences of numbers of periods count
                other = devices.code[d, j]
                periods = np.floor((devices.start[d, i] - devices.start[d, j]) / period) + 1.0
                held += tables.later[other // size, other % size] * periods
        most = max(most, held)
    return most
