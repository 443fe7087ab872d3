"""The zero-bubble paper's heuristic for given times and memory (Qi et al., ICLR 2024, section 3.1).

The paper describes it in words; the details follow sail-sg/zero-bubble-pipeline-parallelism, zb.py.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import ceil

from auto3d.schedule.advance import advance_devices
from auto3d.schedule.check import ScheduleError, check_rendezvous
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.operation_times import EqualTimes

F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741


def fit_to_times(handmade: Schedule, *, times: EqualTimes, limit: int, deferred: int) -> Schedule:
    """``handmade`` in the heuristic's best order for ``times`` within the memory of ``limit`` micro-batches per device.

    ``handmade`` has stage s on device s. ``deferred`` is the percentage of a micro-batch's activations that its input
    half leaves to the weight half.

    The heuristic makes one order for each combination of its binary choices. The paper takes the order whose longest
    device is shortest, from its first to its last operation: there, updates do not wait for other devices. Here they
    may, so orders with a longer makespan than ``handmade`` do not count. Nor do orders for which devices would have to
    hold more messages than ``check_rendezvous`` allows; those occur where messages take longer than operations. If no
    order is left that is shorter than ``handmade``, the result is ``handmade``.
    """
    usual = lengths(handmade.operations, times)
    shorter = []
    for exceed, skips, starts_late in product((False, True), repeat=3):
        walk = _Walk(handmade.devices, handmade.micro_batches, times, limit, deferred)
        walk.warm_up(exceed)
        for _ in range(1, handmade.micro_batches):
            walk.round(skips, starts_late)
        walk.finish()
        length = lengths(walk.orders, times)
        if length < usual and length[1] <= usual[1]:
            shorter.append((length, walk.orders))
    for _, orders in sorted(shorter, key=lambda entry: entry[0]):
        schedule = replace(handmade, operations=tuple(map(tuple, orders)))
        with suppress(ScheduleError):
            check_rendezvous(schedule)
            return schedule
    return handmade


def lengths(orders: Sequence[Sequence[Operation]], times: EqualTimes) -> tuple[float, float]:
    """The longest time from the first to the last operation of a device, and the makespan.

    Messages from one device to another queue in the order in which they are sent, as in the simulator.
    """
    devices = len(orders)
    time_of = {F: times.forward, I: times.backward_input, W: times.backward_weight}
    arrival: dict[tuple[Kind, int, int], float] = {}  # (kind, device that receives, micro-batch) -> arrival
    clock, begun = [0.0] * devices, [-1.0] * devices
    link = {F: [0.0] * devices, I: [0.0] * devices}  # when the last message of each kind has left each device

    def run_next(device: int, index: int) -> bool:
        operation = orders[device][index]
        kind, (m,) = operation.kind, operation.micro_batches
        start = clock[device]
        if (kind is F and device) or (kind is I and device < devices - 1):
            arrived = arrival.get((kind, device, m))
            if arrived is None:
                return False
            start = max(start, arrived)
        if not index:
            begun[device] = start
        clock[device] = end = start + time_of[kind]
        if kind is not W:
            link[kind][device] = end = max(end, link[kind][device]) + times.message
            arrival[kind, device + (1 if kind is F else -1), m] = end
        return True

    advance_devices([0] * devices, [len(order) for order in orders], run_next)
    return max(end - start for start, end in zip(begun, clock, strict=True)), max(clock)


class _Walk:
    """One run of the heuristic: the operations of each device so far, and when they end.

    It goes in rounds, one per micro-batch: at most one forward on each device, from the first to the last, and then one
    input half on each device, from the last to the first.
    """

    def __init__(self, devices: int, micro_batches: int, times: EqualTimes, limit: int, deferred: int) -> None:
        self.orders: list[list[Operation]] = [[] for _ in range(devices)]
        self._micro_batches, self._limit, self._last = micro_batches, limit, devices - 1
        self._time = {F: times.forward, I: times.backward_input, W: times.backward_weight}
        self._message = times.message
        self._deferred = deferred
        self._clock = [0.0] * devices
        self._waited = [0.0] * devices  # since the first forward
        self._ran = {kind: [0] * devices for kind in (F, I, W)}
        self._arrivals: dict[Kind, list[list[float]]] = {  # per micro-batch: when the device can run its F or I
            F: [[0.0] * micro_batches] + [[] for _ in range(devices - 1)],
            I: [[] for _ in range(devices - 1)] + [[0.0] * micro_batches],
        }

    def warm_up(self, exceed: bool) -> None:
        """Run the first forwards, as many as fit before the first gradient arrives, and then the first input halves.

        ``exceed`` fills the time until then, although the last forward may delay the first input half.
        """
        ahead = [1] * len(self.orders)
        for device in range(len(self.orders)):
            self._run(device, F)
        gradient = self._clock[-1] + self._time[I] + self._message  # arrival on the device before
        for device in range(self._last - 1, -1, -1):
            clock = self._clock[device]
            while ahead[device] < min(self._limit, self._micro_batches):
                if clock >= gradient or (not exceed and clock + self._time[F] > gradient):
                    break
                clock += self._time[F]
                ahead[device] += 1
            gradient = max(clock, gradient) + self._time[I] + self._message
        for device in range(1, len(self.orders)):  # fewer than on the device before, until forwards run out
            fewer = ahead[device - 1] - (ahead[device] < self._micro_batches)
            ahead[device] = min(ahead[device], max(1, fewer))
        for device in range(len(self.orders)):
            for _ in range(ahead[device] - 1):
                self._run(device, F)
        for device in range(self._last, -1, -1):
            self._run(device, I)

    def round(self, skips: bool, starts_late: bool) -> None:
        """Run one micro-batch's forwards and input halves; the first input halves have run before.

        ``skips`` leaves out a forward of a device that is two or more ahead of the next device, if it would come after
        the forward and the input half that the next device runs now, and costs less than the longest wait of a device.
        ``starts_late`` runs a weight half in a wait that is too short for it even where the wait is harmless.
        """
        runs = [count < self._micro_batches for count in self._ran[F]]
        for device in range(self._last):
            runs[device] = runs[device] and not (skips and self._can_skip(device))
        for device in range(self._last - 1, -1, -1):
            if self._ran[F][device + 1] < self._micro_batches:
                runs[device] = runs[device] and runs[device + 1]
        for device, forward in enumerate(runs):
            if forward:
                while self._excess(device) > 0:
                    self._run(device, W)
                self._fill(device, F, starts_late)
                self._run(device, F)
        for device in range(self._last, -1, -1):
            self._fill(device, I, starts_late)
            if device == 0 and self._ran[F][0] == self._micro_batches:  # no device waits for these input halves
                self._run_pending(0)
            self._run(device, I)

    def finish(self) -> None:
        """Run all remaining weight halves."""
        for device in range(len(self.orders)):
            self._run_pending(device)

    def _run(self, device: int, kind: Kind) -> None:
        micro_batch = self._ran[kind][device]
        start = self._clock[device]
        if kind is not W:
            start = max(start, self._arrivals[kind][device][micro_batch])
            if self._ran[F][device]:
                self._waited[device] += start - self._clock[device]
        end = self._clock[device] = start + self._time[kind]
        self._ran[kind][device] += 1
        self.orders[device].append(Operation(kind, device, (micro_batch,)))
        if kind is F and device < self._last:
            self._arrivals[F][device + 1].append(end + self._message)
        elif kind is I and device:
            self._arrivals[I][device - 1].append(end + self._message)

    def _run_pending(self, device: int) -> None:
        while self._pending(device):
            self._run(device, W)

    def _pending(self, device: int) -> int:
        """The weight halves that can run."""
        return self._ran[I][device] - self._ran[W][device]

    def _excess(self, device: int) -> int:
        """How much one more forward would exceed the limit, in per cent of a micro-batch's activations."""
        held = 100 * self._ran[F][device] - (100 - self._deferred) * self._ran[I][device]
        return held - self._deferred * self._ran[W][device] + 100 - 100 * self._limit

    def _fill(self, device: int, kind: Kind, starts_late: bool) -> None:
        """Fill the wait before the next operation of ``kind`` with weight halves."""
        arrival = self._arrivals[kind][device][self._ran[kind][device]]
        while self._pending(device) and self._clock[device] + self._time[W] <= arrival:
            self._run(device, W)
        wait = arrival - self._clock[device]
        if self._pending(device) and wait > 0 and (starts_late or wait > self._harmless(device)):
            self._run(device, W)

    def _harmless(self, device: int) -> float:
        """The longest wait that leaves ``device`` no longer than the device that has waited most."""
        return max(self._waited) - self._waited[device]

    def _can_skip(self, device: int) -> bool:
        after = device + 1
        if self._ran[F][device] < self._ran[F][after] + 2 or self._ran[F][after] == self._micro_batches:
            return False
        busy_until = self._clock[after] + self._time[F] + self._time[I] + self._message
        if self._clock[device] >= busy_until:
            return True
        excess = self._excess(device)
        weights = ceil(excess / self._deferred) if excess > 0 else 0
        if self._clock[device] + self._time[F] + weights * self._time[W] <= busy_until:
            return False
        return busy_until - self._clock[device] <= self._harmless(device)
