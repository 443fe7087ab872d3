"""Schedule and costs -> when each operation starts and ends."""

from dataclasses import dataclass
from functools import cached_property

from auto3d.schedule.check import ScheduleError
from auto3d.schedule.dependencies import numbered
from auto3d.schedule.operation import Operation, Schedule
from auto3d.simulate.costs import Costs
from auto3d.simulate.shared_machines import run_shared
from auto3d.simulate.work import DeviceWork, lay_out, sync_groups


@dataclass(frozen=True, kw_only=True)
class Sync:
    """One all-reduce of a stage's gradients: it begins once all its replicas have started it, and those that their
    devices started before are over."""

    stage: int
    started: dict[int, float]  # device -> when its replica has started it
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Times by operation number (``auto3d.schedule.dependencies``), in the unit of the costs; the first start is 0."""

    schedule: Schedule
    costs: Costs
    operations: list[Operation]
    work: DeviceWork
    start: list[float]
    end: list[float]
    arrival: list[float]  # when its message has reached the next stage's device; of an S: its own, see Sync
    spans: list[tuple[int, int]]  # runs of one device's operations; one after the other, an order that could be run

    @cached_property
    def makespan(self) -> float:
        """From the first start until the last operation and the last all-reduce have ended."""
        return max(max(self.end, default=0.0), max((sync.end for sync in self.syncs), default=0.0))

    @cached_property
    def syncs(self) -> list[Sync]:
        """The all-reduces, in order of stage and round."""
        found = []
        for (stage, _), members in sorted(sync_groups(self.operations).items()):
            started = {self.device_of(self.operations[n]): self.end[n] for n in members}
            end = max(self.arrival[n] for n in members)
            found.append(Sync(stage=stage, started=started, begin=end - self.costs.sync[stage], end=end))
        return found

    def device_of(self, operation: Operation) -> int:
        return self.schedule.device_of[operation.stage, operation.pipe]

    def numbers(self, device: int) -> range:
        """The numbers of a device's operations, in order."""
        return range(self.work.bounds[device], self.work.bounds[device + 1])


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run each device's operations in order, each as soon as its device is free and its inputs are there.

    Messages of one direction between two devices queue behind each other, in the order in which they were made. Where
    they do not overlap compute, a message occupies its sender from the end of the operation that made it, and its
    receiver for as long again, from when the receiver turns to the operation that needs it, at the earliest together
    with the sender. A stage's gradients are reduced beside compute, from when all its replicas have started it (S);
    the all-reduces of one device take turns, in the order in which it started them. An update (U) waits for all that
    its device has started. Devices that share a machine's processors slow each other down while they compute.

    Raises ScheduleError where devices wait for each other.
    """
    costs.check_fit(schedule)
    operations = numbered(schedule)
    work = lay_out(schedule, costs)
    if costs.shared_machines:
        start, end, arrival, position = run_shared(work, costs)
        spans = [(number, number + 1) for number in sorted(range(len(operations)), key=lambda n: (end[n], start[n], n))]
    else:
        start, end, arrival, position, spans = _run_apart(work, overlap=costs.overlap)
    if position != work.bounds[1:]:
        raise ScheduleError(_deadlock(operations, work.waits, arrival, position, work.bounds[1:]))
    return Timeline(
        schedule=schedule,
        costs=costs,
        operations=operations,
        work=work,
        start=start,
        end=end,
        arrival=arrival,
        spans=spans,
    )


def _run_apart(
    work: DeviceWork, *, overlap: bool
) -> tuple[list[float], list[float], list[float], list[int], list[tuple[int, int]]]:
    """Devices that share nothing: starts, ends, arrivals, how far each device came, and spans, as in Timeline."""
    steps, waits, receive = work.steps, work.waits, work.receive
    count, devices = len(steps), len(work.bounds) - 1
    start, end = [0.0] * count, [0.0] * count
    arrival = [-1.0] * count  # below 0: not run yet
    position, stops, free = work.bounds[:-1], work.bounds[1:], [0.0] * devices
    link_free, sync_free = [0.0] * len(work.links), [0.0] * devices
    waiter = [-1] * count  # a device that waits for this operation; -1 for none
    also_waiting = [-1] * devices  # another one that waits for the same operation as this device
    spans: list[tuple[int, int]] = []

    ready = list(range(devices))
    while ready:
        device = ready.pop()
        first, stop, clock = position[device], stops[device], free[device]
        number = first
        while number < stop:
            begin = clock
            for needed in waits[number]:
                time = arrival[needed]
                if time > begin:
                    begin = time
                elif time < 0.0:
                    break
            else:
                duration, after, link = steps[number]
                if receive:
                    begin += receive[number]
                start[number] = begin
                end[number] = arrival[number] = clock = begin + duration
                if after:
                    if link < 0:
                        leave = sync_free[device]
                        arrival[number] = sync_free[device] = (clock if clock > leave else leave) + after
                    elif overlap:
                        leave = link_free[link]
                        arrival[number] = link_free[link] = (clock if clock > leave else leave) + after
                    else:
                        clock += after
                woken = waiter[number]
                while woken >= 0:
                    ready.append(woken)
                    woken = also_waiting[woken]
                number += 1
                continue
            also_waiting[device], waiter[needed] = waiter[needed], device
            break
        if number > first:
            spans.append((first, number))
            position[device], free[device] = number, clock
    return start, end, arrival, position, spans


def _deadlock(
    operations: list[Operation],
    waits: list[tuple[int, ...]],
    arrival: list[float],
    position: list[int],
    stops: list[int],
) -> str:
    stuck = []
    for device, (number, stop) in enumerate(zip(position, stops, strict=True)):
        if number < stop:
            missing = next(needed for needed in waits[number] if arrival[needed] < 0)
            stuck.append(f"device {device} before {operations[number]} waits for {operations[missing]}")
    return f"deadlock: {'; '.join(stuck)}"
