"""The simulation of devices that slow each other's operations: by sharing a machine, or by all-reduces beside them."""

from bisect import bisect
from collections import defaultdict
from heapq import heappop, heappush

from auto3d.simulate.costs import Costs
from auto3d.simulate.work import DeviceWork, sync_groups

Run = tuple[list[float], list[float], list[float], list[int]]
"""Start, end and arrival of the message per operation (arrival -1: it never ran), and per device its next operation."""

_OPERATION, _SUM_BEGINS, _SUM_ENDS = 0, 1, -1  # events: an operation starts or ends, an all-reduce begins or ends


def run_slowed(work: DeviceWork, costs: Costs) -> Run:
    """Run each device's operations in order, each as soon as its device is free and its inputs have arrived.

    Time advances from event to event. An operation proceeds at a speed that changes when operations on its machine
    start or end, and when an all-reduce of its device begins or ends. The time of messages and all-reduces, and of the
    operations S that start all-reduces, does not depend on what is computed.
    """
    run = _SlowedRun(work, costs)
    run.run()
    return run.start, run.end, run.arrival, run.position


class _SlowedRun:
    def __init__(self, work: DeviceWork, costs: Costs) -> None:
        bounds, count = work.numbered.bounds, len(work.steps)
        devices = len(bounds) - 1
        self._work, self._steps, self._waits, self._overlap = work, work.steps, work.waits, costs.overlap
        self._slowdown_beside_sum = costs.sync_slowdown or (0.0,) * devices
        self._machines = costs.shared_machines
        self._machines_of = [
            [number for number, machine in enumerate(self._machines) if machine.processes[device]]
            for device in range(devices)
        ]
        self._devices_of = [
            [device for device in range(devices) if machine.processes[device]] for machine in self._machines
        ]
        arrivals = count + sum(map(len, work.inputs.values()))
        self.start, self.end, self.arrival = [0.0] * count, [0.0] * count, [-1.0] * arrivals
        self.position, self._stops = [*bounds[:-1]], bounds[1:]
        self._free, self._sync_free = [0.0] * devices, [0.0] * devices
        self._link_free = [0.0] * len(work.links)
        self._waiting: defaultdict[int, list[int]] = defaultdict(list)  # operation -> devices that wait for it
        self._now = 0.0
        self._events: list[tuple[float, int, int, int]] = []  # (time, device, its version, kind of event)
        self._version = [0] * devices  # an event of an operation with an older version does not happen
        self._remaining: dict[int, float] = {}  # device -> seconds of its operation at ``since`` if nothing slows it
        self._since, self._slowdown = [0.0] * devices, [1.0] * devices
        self._processes = [0] * len(self._machines)  # per machine, processes that compute
        self._sums = [0] * devices  # per device, all-reduces under way
        self._changed: set[int] = set()  # devices whose speed may have changed
        self._group_of: dict[int, list[int]] = {}  # S -> all S of its all-reduce
        if any(self._slowdown_beside_sum):
            groups = sync_groups(work.numbered.operations).values()
            self._group_of = {number: group for group in groups for number in group}

    def run(self) -> None:
        for device in range(len(self._stops)):
            self._next(device)
        self._set_speeds()
        while self._events:
            self._now = self._events[0][0]
            while self._events and self._events[0][0] == self._now:
                _, device, version, kind = heappop(self._events)
                if kind != _OPERATION:
                    self._sums[device] += kind
                    self._changed.add(device)
                elif version == self._version[device]:
                    if device in self._remaining:
                        self._finish(device)
                    else:
                        self._begin(device)
            self._set_speeds()

    def _next(self, device: int) -> None:
        """Plan the start of the next operation of ``device``, or have it wait for one of another device."""
        number = self.position[device]
        if number == self._stops[device]:
            return
        start = self._free[device]
        for needed in self._waits[number]:
            if self.arrival[needed] < 0.0:
                self._waiting[needed].append(device)
                return
            start = max(start, self.arrival[needed])
        if self._work.receive:
            start += self._work.receive[number]
        if start > self._now:
            self._plan(device, start)
        else:
            self._begin(device)

    def _plan(self, device: int, time: float) -> None:
        """Have the operation of ``device`` start or end at ``time``, and not when it was to before."""
        self._version[device] += 1
        heappush(self._events, (time, device, self._version[device], _OPERATION))

    def _begin(self, device: int) -> None:
        number = self.position[device]
        duration, after, link, _ = self._steps[number]
        self.start[number] = self._since[device] = self._now
        if after and link < 0:
            self._start_sum(device, number)
            return
        self._remaining[device], self._slowdown[device] = duration, 0.0
        self._changed.add(device)
        self._count(device, 1)

    def _count(self, device: int, sign: int) -> None:
        """Count ``device`` among those that compute, or (-1) no longer; an operation without time does not compute."""
        if self._steps[self.position[device]][0] > 0.0:
            for machine in self._machines_of[device]:
                self._processes[machine] += sign * self._machines[machine].processes[device]
                self._changed.update(self._devices_of[machine])

    def _finish(self, device: int) -> None:
        number = self.position[device]
        self._count(device, -1)
        del self._remaining[device]
        now = self.end[number] = self.arrival[number] = self._free[device] = self._now
        _, after, link, lead = self._steps[number]
        if after and self._overlap:
            self.arrival[number] = self._link_free[link] = max(now - lead, self._link_free[link]) + after
        elif after:
            self._free[device] = now + after
        for message in self._work.inputs.get(number, ()):
            if self._overlap:
                leave = max(now - message.lead, self._link_free[message.link])
                self.arrival[message.number] = self._link_free[message.link] = leave + message.time
            else:
                self.arrival[message.number] = self._free[device]
                self._free[device] += message.time
        self._go_on(device, number)

    def _start_sum(self, device: int, number: int) -> None:
        """Run the S ``number``, whose end is known now: nothing slows it.

        If it is the last S of its all-reduce, the all-reduce begins as soon as the earlier all-reduces of its devices
        have ended.
        """
        duration, after, _, _ = self._steps[number]
        end = self.end[number] = self._free[device] = self._now + duration
        self.arrival[number] = self._sync_free[device] = max(end, self._sync_free[device]) + after
        group = self._group_of.get(number, ())
        if group and min(map(self.arrival.__getitem__, group)) >= 0.0:
            over, time = max((self.arrival[member], self._steps[member][1]) for member in group)
            for summing in {bisect(self._work.numbered.bounds, member) - 1 for member in group}:
                heappush(self._events, (max(self._now, over - time), summing, -1, _SUM_BEGINS))
                heappush(self._events, (over, summing, -1, _SUM_ENDS))
        self._go_on(device, number)

    def _go_on(self, device: int, number: int) -> None:
        """Plan what follows the operation ``number`` of ``device``, and what has waited for it elsewhere."""
        self.position[device] += 1
        sent = [message.number for message in self._work.inputs.get(number, ())]
        for ended in (number, *sent):
            for woken in self._waiting.pop(ended, ()):
                self._next(woken)
        self._next(device)

    def _set_speeds(self) -> None:
        """Plan the ends of operations whose speed has changed."""
        for device in self._changed:
            if device not in self._remaining:
                continue
            slowdown = self._slowdown_of(device)
            before = self._slowdown[device]
            if slowdown == before:
                continue
            if before:  # 0: the operation starts now
                done = (self._now - self._since[device]) / before
                self._remaining[device] = max(0.0, self._remaining[device] - done)
            self._since[device], self._slowdown[device] = self._now, slowdown
            self._plan(device, self._now + self._remaining[device] * slowdown)
        self._changed.clear()

    def _slowdown_of(self, device: int) -> float:
        """The slowdown on the machine that slows its processes most, times that beside all-reduces."""
        slowdown = 1.0
        if machines := self._machines_of[device]:
            slowdown = max(self._machines[machine].slowdown_of(self._processes[machine]) for machine in machines)
        return slowdown * (1.0 + self._slowdown_beside_sum[device]) if self._sums[device] else slowdown
