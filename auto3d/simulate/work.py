"""The input of the simulator's loop: a schedule and its costs as flat lists with one entry per operation."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from auto3d.schedule.dependencies import bounds, dependencies, numbered
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.simulate.costs import Costs

Step = tuple[float, float, int, float]
"""(duration of an operation, time of its messages or of the all-reduce after it, number of their link or -1, lead).

The lead is how long before the end of the operation its first message leaves: 0, unless it runs several micro-batches
and sends each of them as soon as it is done. Equal operations have the same tuple.
"""


_StepKey = tuple[Kind, int, int, int, int]  # kind, stage, pipe, number of micro-batches, slice


@dataclass(frozen=True, kw_only=True)
class NumberedSchedule:
    """What the work of a schedule has in common at all costs; operations have the numbers of
    ``auto3d.schedule.dependencies``."""

    operations: Sequence[Operation]
    bounds: Sequence[int]  # operations of device d: bounds[d] to bounds[d + 1] - 1
    step_keys: Sequence[_StepKey]  # the kinds of steps, each once; the slice is the operation's
    step_of: Sequence[int]  # per operation: the place of its kind in ``step_keys``
    waits: Sequence[tuple[int, ...]]  # per operation: those whose messages or all-reduces must have ended
    recomputed_inside: Mapping[int, int]  # see the function
    joined: frozenset[int]  # the S that another S of their device and all-reduce replaces


@dataclass(frozen=True, slots=True)
class InputMessage:
    """What a forward of stage 0 sends to another device, of the inputs that it has read for a stage there."""

    number: int  # number of its arrival, after the numbers of all operations
    target: int  # stage
    time: float
    link: int
    lead: float  # how long before the end of the operation the message may leave, as in a Step


@dataclass(frozen=True, kw_only=True)
class DeviceWork:
    """The work of all devices: a numbered schedule with its steps."""

    numbered: NumberedSchedule
    steps: list[Step]
    inputs: Mapping[int, Sequence[InputMessage]]  # forward of stage 0 -> the messages that follow its activations
    waits: Sequence[tuple[int, ...]]  # the waits of ``numbered``, and the arrivals of messages of inputs
    links: dict[tuple[int, int], int]  # (sending, receiving device) -> number of the link
    receive: list[float]  # per operation: time that receiving takes on its device; empty if messages overlap compute


@lru_cache(8)  # auto3d.schedule.shape keeps as few of the schedules themselves
def numbered_schedule(schedule: Schedule) -> NumberedSchedule:
    """What is found out once of a schedule that is simulated at several costs."""
    operations = numbered(schedule)
    groups = sync_groups(operations)
    joined: set[int] = set()
    for group in groups.values():
        last_of = {schedule.device_of[operations[n].stage, operations[n].pipe]: n for n in group}
        joined.update(set(group).difference(last_of.values()))
    slices = schedule.slices  # a computation runs one slice, a sync or update none
    places: dict[_StepKey, int] = {}
    return NumberedSchedule(
        operations=operations,
        bounds=bounds(schedule),
        step_of=[
            places.setdefault((kind, stage, pipe, len(m), sum(m) % slices), len(places))
            for kind, stage, m, pipe in operations
        ],
        step_keys=list(places),
        waits=_waits(schedule, operations, groups),
        recomputed_inside=recomputed_inside(schedule),
        joined=frozenset(joined),
    )


def lay_out(schedule: Schedule, costs: Costs) -> DeviceWork:
    """The work of ``schedule`` at ``costs``."""
    common = numbered_schedule(schedule)
    by_key = _Steps(schedule, costs)
    kinds = [by_key[key] for key in common.step_keys]
    steps = [kinds[place] for place in common.step_of]
    for number, count in common.recomputed_inside.items():
        operation = common.operations[number]
        duration, after, link, _ = steps[number]
        part = sum(operation.micro_batches) % schedule.slices
        duration += count * by_key[Kind.RECOMPUTE, operation.stage, operation.pipe, 1, part][0]
        steps[number] = duration, after, link, _lead(duration, after, len(operation.micro_batches))
    if costs.by_operation:
        steps = [
            _measured(operation, link, *times)
            for operation, (_, _, link, _), times in zip(common.operations, steps, costs.by_operation, strict=True)
        ]
    for number in common.joined:
        # A device with a stage on several pipes adds their gradients and reduces them once.
        steps[number] = 0.0, 0.0, -1, 0.0
    inputs, waits = _inputs(schedule, costs, common, by_key) if any(costs.inputs) else ({}, common.waits)
    receive = [] if costs.overlap else _receives(common.bounds, steps, common.waits)
    times = {message.number: message.time for messages in inputs.values() for message in messages}
    for number, needed in enumerate(waits) if times and receive else ():
        receive[number] += sum(times.get(awaited, 0.0) for awaited in needed)
    return DeviceWork(numbered=common, steps=steps, inputs=inputs, waits=waits, links=by_key.links, receive=receive)


def _inputs(
    schedule: Schedule, costs: Costs, common: NumberedSchedule, steps: "_Steps"
) -> tuple[dict[int, list[InputMessage]], list[tuple[int, ...]]]:
    """The messages of inputs, and what each operation waits for with them."""
    waits, messages = list(common.waits), dict[int, list[InputMessage]]()
    forwards = [n for n, operation in enumerate(common.operations) if operation.kind is Kind.FORWARD]
    readers = [number for number in forwards if common.operations[number].stage == 0]
    reader_of = {m: number for number in readers for m in common.operations[number].micro_batches}
    number_of: dict[tuple[int, int], int] = {}  # (forward of stage 0, stage) -> number of the message
    for reader in readers:
        _, _, micro_batches, pipe = common.operations[reader]
        count, sender = len(micro_batches), schedule.device_of[0, pipe]
        duration = steps[common.step_keys[common.step_of[reader]]][0]
        for stage, time in enumerate(costs.inputs):
            device = schedule.device_of[stage, pipe]
            if time and device != sender:
                number_of[reader, stage] = number = len(common.operations) + len(number_of)
                link, all_of_them = steps.links.setdefault((sender, device), len(steps.links)), count * time
                message = InputMessage(number, stage, all_of_them, link, _lead(duration, all_of_them, count))
                messages.setdefault(reader, []).append(message)
    for number in forwards:
        operation = common.operations[number]
        used = dict.fromkeys((reader_of[m], operation.stage) for m in operation.micro_batches)
        waits[number] = (*waits[number], *(number_of[key] for key in used if key in number_of))
    return messages, waits


class _Steps(dict[_StepKey, Step]):
    """Kind of step -> step, computed at its first use."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        super().__init__()
        self.schedule, self.costs = schedule, costs
        self.links: dict[tuple[int, int], int] = {}

    def __missing__(self, key: _StepKey) -> Step:
        kind, stage, pipe, count, part = key
        device = self.schedule.device_of[stage, pipe]
        if kind is Kind.SYNC:
            time = self.costs.sync[stage]
            step = self.costs.sync_start[device] if time and self.costs.sync_start else 0.0, time, -1, 0.0
        elif kind is Kind.UPDATE:
            step = self.costs.update[stage] / self.costs.speed[device], 0.0, -1, 0.0
        else:
            duration = self._time(kind, stage, count, part) / self.costs.speed[device]
            message, link = self._message(kind, stage, pipe)
            step = duration, count * message, link, _lead(duration, count * message, count)
        self[key] = step
        return step

    def _time(self, kind: Kind, stage: int, count: int, part: int) -> float:
        """The time of an operation on a device of speed 1."""
        of_slice = {
            Kind.FORWARD: self.costs.forward_of_slice,
            Kind.BACKWARD: self.costs.backward_of_slice,
            Kind.RECOMPUTE: self.costs.recompute_of_slice,
        }.get(kind)
        if of_slice:
            assert count == 1, "the checker lets an operation run one slice"
            return of_slice[stage][part]
        return count / self.schedule.parts * self.costs.times_of(kind)[stage]

    def _message(self, kind: Kind, stage: int, pipe: int) -> tuple[float, int]:
        """The time and the link of each message of an operation; (0, -1) if it sends none to another device."""
        receiver = {Kind.FORWARD: stage + 1, Kind.BACKWARD: stage - 1, Kind.BACKWARD_INPUT: stage - 1}.get(kind, -1)
        sender, to = self.schedule.device_of[stage, pipe], self.schedule.device_of.get((receiver, pipe))
        if to is None or to == sender:
            return 0.0, -1
        costs = self.costs.messages[min(stage, receiver)]
        time = costs.latency + (costs.forward if receiver > stage else costs.backward) / self.schedule.parts
        return time, self.links.setdefault((sender, to), len(self.links))


def _measured(operation: Operation, link: int, duration: float, after: float) -> Step:
    """The step of an operation with a time of its own."""
    if link < 0 and operation.kind is not Kind.SYNC:
        after = 0.0
    return duration, after, link, _lead(duration, after, len(operation.micro_batches))


def _lead(duration: float, messages: float, count: int) -> float:
    """The lead of an operation on ``count`` micro-batches, whose messages take so long together.

    They go one after the other, each as soon as its micro-batch is done. All but the last run while the operation
    does, as far as they fit.
    """
    return (count - 1) / count * min(messages, duration) if count > 1 else 0.0


def recomputed_inside(schedule: Schedule) -> dict[int, int]:
    """Number of a B or I -> number of the micro-batches that it recomputes inside itself, if there are any."""
    inside: dict[int, int] = {}
    recomputed: set[tuple[int, int]] = set()
    again, backward, backward_input = Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT
    for number, operation in enumerate(numbered(schedule) if schedule.recompute else ()):
        kind = operation.kind
        if kind is again and operation.stage in schedule.recompute:
            recomputed.update((operation.stage, micro_batch) for micro_batch in operation.micro_batches)
        elif (kind is backward or kind is backward_input) and operation.stage in schedule.recompute:
            count = len(operation.micro_batches)
            if recomputed:
                count -= sum((operation.stage, micro_batch) in recomputed for micro_batch in operation.micro_batches)
            if count:
                inside[number] = count
    return inside


def sync_groups(operations: Sequence[Operation]) -> dict[tuple[int, int], list[int]]:
    """(stage, round) -> the numbers of the S that start one all-reduce: the round-th S of the stage on each pipe."""
    groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    rounds: defaultdict[tuple[int, int], int] = defaultdict(int)
    sync = Kind.SYNC
    for number, operation in enumerate(operations):
        if operation.kind is sync:
            pipe_stage = operation.stage, operation.pipe
            groups[operation.stage, rounds[pipe_stage]].append(number)
            rounds[pipe_stage] += 1
    return groups


def _waits(
    schedule: Schedule, operations: Sequence[Operation], groups: dict[tuple[int, int], list[int]]
) -> list[tuple[int, ...]]:
    """Per operation, those that it waits for: its dependencies or, for a U, the S of the all-reduces of its device.

    An R or W does not wait for its F or I: these have ended on its device. Waiting for the arrival of their messages on
    other devices would be wrong.
    """
    waits = dependencies(schedule)
    group_of = {number: group for group in groups.values() for number in group}
    recompute, weight_half, sync, update = Kind.RECOMPUTE, Kind.BACKWARD_WEIGHT, Kind.SYNC, Kind.UPDATE
    number = 0
    for device in schedule.operations:
        first, joined = number, []
        for number, operation in enumerate(device, first):
            kind = operation.kind
            if kind is recompute or kind is weight_half:
                waits[number] = tuple(needed for needed in waits[number] if not first <= needed < number)
            elif kind is sync:
                joined += group_of[number]
            elif kind is update:
                waits[number], joined = tuple(joined), []
        number = first + len(device)
    return waits


def _receives(bounds: Sequence[int], steps: list[Step], waits: Sequence[tuple[int, ...]]) -> list[float]:
    """Per operation, the time to receive its messages. The first operation that needs a message receives it."""
    receive = [0.0] * len(waits)
    received = bytearray(len(waits))
    for first, stop in pairwise(bounds):
        for number in range(first, stop):
            for needed in waits[number]:
                if needed < first or needed >= stop:
                    _, after, link, _ = steps[needed]
                    if link >= 0 and not received[needed]:
                        received[needed] = True
                        receive[number] += after
    return receive
