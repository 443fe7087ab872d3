"""The simulator: when each operation of a schedule starts and ends, given the costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from auto3d.schedule.check import ScheduleError
from auto3d.schedule.operation import Operation, Schedule
from auto3d.simulate.costs import Costs
from auto3d.simulate.slowed import run_slowed
from auto3d.simulate.work import DeviceWork, lay_out, sync_groups


@dataclass(frozen=True, kw_only=True)
class Sync:
    """One all-reduce of a stage's gradients.

    It begins once all devices that hold the stage have started it and their earlier all-reduces have ended.
    """

    stage: int
    started: dict[int, float]  # device -> time at which it has started the all-reduce: the end of its S
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Times by operation number (``auto3d.schedule.dependencies``), in the unit of the costs; the first start is 0."""

    schedule: Schedule
    costs: Costs
    work: DeviceWork
    start: list[float]
    end: list[float]
    arrival: list[float]
    """When the message has reached the next device; for an S: when its all-reduce has ended. Entries of messages of
    inputs come after the entries of all operations."""
    spans: list[tuple[int, int]]  # (first, stop) of runs of operations of one device, in an order that could be run

    @property
    def operations(self) -> Sequence[Operation]:
        return self.work.numbered.operations

    @cached_property
    def makespan(self) -> float:
        """The time from the first start until the last operation and the last all-reduce have ended."""
        return max(max(self.end, default=0.0), max((sync.end for sync in self.syncs), default=0.0))

    @cached_property
    def syncs(self) -> list[Sync]:
        """The all-reduces, in order of stage and round."""
        syncs = []
        for (stage, _), members in sorted(sync_groups(self.operations).items()):
            started = {self.device_of(self.operations[n]): self.end[n] for n in members}
            end, time = max((self.arrival[n], self.work.steps[n][1]) for n in members)
            syncs.append(Sync(stage=stage, started=started, begin=end - time, end=end))
        return syncs

    def device_of(self, operation: Operation) -> int:
        return self.schedule.device_of[operation.stage, operation.pipe]

    def numbers(self, device: int) -> range:
        """The numbers of the operations of ``device``, in order."""
        return range(self.work.numbered.bounds[device], self.work.numbered.bounds[device + 1])


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline in which each device runs its operations in order, each as soon as the device is free and its inputs
    have arrived.

    - Messages from one device to another queue in the order in which they are sent. An operation on several
      micro-batches sends each of them as soon as it is done; all have arrived when the last has.
    - The messages by which stage 0 sends inputs to other stages follow its activations, each on the link to its device.
    - If messages do not overlap compute, a message occupies its sender from the end of the operation that sends it. It
      occupies its receiver for the same time, from when the receiver comes to the operation that needs it, but not
      before the sender begins.
    - The all-reduce of a stage's gradients overlaps compute. It begins when all its devices have started it (S); the
      all-reduces of one device run one after the other, in the order in which it started them.
    - An S takes ``costs.sync_start`` of its device's own time, whatever runs beside it; none if its all-reduce takes no
      time. While an all-reduce runs, from its begin to its end, all operations of its devices but S take
      1 + ``costs.sync_slowdown`` times as long; several at once slow a device as much as one. The all-reduce takes as
      long whatever runs beside it.
    - An update (U) waits for all all-reduces that its device has started.
    - Devices that share the processors of a machine slow each other down while they compute.

    Raises InputError if the costs do not fit the schedule, ScheduleError if devices wait for each other.
    """
    costs.check_fit(schedule)
    work = lay_out(schedule, costs)
    numbered = work.numbered
    if costs.shared_machines or any(costs.sync_slowdown):
        start, end, arrival, position = run_slowed(work, costs)
        spans = [(number, number + 1) for number in sorted(range(len(work.steps)), key=lambda n: (end[n], start[n], n))]
    else:
        start, end, arrival, position, spans = _run_independent(work, overlap=costs.overlap)
    if position != numbered.bounds[1:]:
        raise ScheduleError(_deadlock(work, arrival, position))
    return Timeline(
        schedule=schedule,
        costs=costs,
        work=work,
        start=start,
        end=end,
        arrival=arrival,
        spans=spans,
    )


def _run_independent(
    work: DeviceWork, *, overlap: bool
) -> tuple[list[float], list[float], list[float], list[int], list[tuple[int, int]]]:
    """Run devices that do not slow each other down.

    Returns start, end and arrival per operation, the next operation per device, and the spans; see Timeline.
    """
    steps, waits, receive, bounds, inputs = work.steps, work.waits, work.receive, work.numbered.bounds, work.inputs
    count, devices = len(steps), len(bounds) - 1
    start, end = [0.0] * count, [0.0] * count
    count += sum(map(len, inputs.values()))
    arrival = [-1.0] * count  # below 0: the operation has not run yet
    position, stops, free = [*bounds[:-1]], bounds[1:], [0.0] * devices
    link_free, sync_free = [0.0] * len(work.links), [0.0] * devices
    waiter = [-1] * count  # operation -> a device that waits for it, -1 for none
    also_waiting = [-1] * devices  # device -> another device that waits for the same operation, -1 for none
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
                duration, after, link, lead = steps[number]
                if receive:
                    begin += receive[number]
                start[number] = begin
                end[number] = arrival[number] = clock = begin + duration
                if after:
                    if link < 0:
                        leave = sync_free[device]
                        arrival[number] = sync_free[device] = (clock if clock > leave else leave) + after
                    elif overlap:
                        leave = clock - lead
                        if link_free[link] > leave:
                            leave = link_free[link]
                        arrival[number] = link_free[link] = leave + after
                    else:
                        clock += after
                woken = waiter[number]
                while woken >= 0:
                    ready.append(woken)
                    woken = also_waiting[woken]
                if inputs:
                    for message in inputs.get(number, ()):
                        arrival[message.number] = clock
                        if overlap:
                            leave = max(clock - message.lead, link_free[message.link])
                            arrival[message.number] = link_free[message.link] = leave + message.time
                        else:
                            clock += message.time
                        woken = waiter[message.number]
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


def _deadlock(work: DeviceWork, arrival: Sequence[float], position: Sequence[int]) -> str:
    numbered = work.numbered
    sender = {message.number: number for number, messages in work.inputs.items() for message in messages}
    stuck = []
    for device, (number, stop) in enumerate(zip(position, numbered.bounds[1:], strict=True)):
        if number < stop:
            missing = next(needed for needed in work.waits[number] if arrival[needed] < 0)
            missing = sender.get(missing, missing)
            stuck.append(
                f"device {device} before {numbered.operations[number]} waits for {numbered.operations[missing]}"
            )
    return f"deadlock: {'; '.join(stuck)}"
