"""A schedule and its costs as flat lists, one entry per operation by its number: what the simulator's loop reads."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from auto3d.schedule.dependencies import bounds, dependencies, numbered
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.simulate.costs import Costs

Step = tuple[float, float, int]
"""What an operation takes: its duration; the time from its end until its message, or its stage's all-reduce, is over;
and the link that the message takes, -1 for none. Operations that take the same share one."""


@dataclass(frozen=True, kw_only=True)
class DeviceWork:
    bounds: list[int]  # operations of device d: bounds[d] to bounds[d + 1]
    steps: list[Step]
    links: dict[tuple[int, int], int]  # (sending, receiving device) -> number of the link
    waits: list[tuple[int, ...]]  # operations whose messages, or all-reduces, must be over
    receive: list[float]  # what receiving takes of the operation's own device; empty where messages overlap compute


def lay_out(schedule: Schedule, costs: Costs) -> DeviceWork:
    operations = numbered(schedule)
    device_bounds = bounds(schedule)
    groups = sync_groups(operations)
    waits = _waits(schedule, operations, groups)
    prices = _Prices(schedule, costs)
    steps = [prices[o.kind, o.stage, o.pipe, len(o.micro_batches)] for o in operations]
    for number, count in recomputed_inside(schedule).items():
        stage, pipe = operations[number].stage, operations[number].pipe
        duration, after, link = steps[number]
        steps[number] = duration + count * prices[Kind.RECOMPUTE, stage, pipe, 1][0], after, link
    for group in groups.values():
        last_of = {schedule.device_of[operations[n].stage, operations[n].pipe]: n for n in group}
        for number in set(group).difference(last_of.values()):
            steps[number] = 0.0, 0.0, -1  # the device adds up what it has of the stage, and reduces it once
    receive = [] if costs.overlap else _receives(device_bounds, steps, waits)
    return DeviceWork(bounds=device_bounds, steps=steps, links=prices.links, waits=waits, receive=receive)


class _Prices(dict[tuple[Kind, int, int, int], Step]):
    """(kind, stage, pipe, how many micro-batches) -> step, made when first asked for."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        super().__init__()
        self.schedule, self.costs = schedule, costs
        self.links: dict[tuple[int, int], int] = {}

    def __missing__(self, key: tuple[Kind, int, int, int]) -> Step:
        kind, stage, pipe, count = key
        device = self.schedule.device_of[stage, pipe]
        share = count / self.schedule.parts
        if kind is Kind.SYNC:
            step = 0.0, self.costs.sync[stage], -1
        elif kind is Kind.UPDATE:
            step = self.costs.update[stage] / self.costs.speed[device], 0.0, -1
        else:
            duration = share * self.costs.times_of(kind)[stage] / self.costs.speed[device]
            step = duration, *self._message(kind, stage, pipe, share)
        self[key] = step
        return step

    def _message(self, kind: Kind, stage: int, pipe: int, share: float) -> tuple[float, int]:
        """Its time and its link; -1 where nothing is sent to another device."""
        receiver = {Kind.FORWARD: stage + 1, Kind.BACKWARD: stage - 1, Kind.BACKWARD_INPUT: stage - 1}.get(kind, -1)
        sender, to = self.schedule.device_of[stage, pipe], self.schedule.device_of.get((receiver, pipe))
        if to is None or to == sender:
            return 0.0, -1
        costs = self.costs.messages[min(stage, receiver)]
        time = costs.latency + share * (costs.forward if receiver > stage else costs.backward)
        return time, self.links.setdefault((sender, to), len(self.links))


def recomputed_inside(schedule: Schedule) -> dict[int, int]:
    """Number of a B or I -> how many of its micro-batches it recomputes inside itself, where there are any."""
    found: dict[int, int] = {}
    recomputed: set[tuple[int, int]] = set()
    for number, operation in enumerate(numbered(schedule) if schedule.recompute else ()):
        if operation.stage in schedule.recompute:
            keys = {(operation.stage, micro_batch) for micro_batch in operation.micro_batches}
            if operation.kind is Kind.RECOMPUTE:
                recomputed |= keys
            elif operation.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and keys - recomputed:
                found[number] = len(keys - recomputed)
    return found


def sync_groups(operations: list[Operation]) -> dict[tuple[int, int], list[int]]:
    """(stage, round) -> the numbers of the S that make one all-reduce: the round-th of each replica of the stage."""
    groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    rounds: defaultdict[tuple[int, int], int] = defaultdict(int)
    sync = Kind.SYNC
    for number, operation in enumerate(operations):
        if operation.kind is sync:
            replica = operation.stage, operation.pipe
            groups[operation.stage, rounds[replica]].append(number)
            rounds[replica] += 1
    return groups


def _waits(
    schedule: Schedule, operations: list[Operation], groups: dict[tuple[int, int], list[int]]
) -> list[tuple[int, ...]]:
    """The dependencies, and for each U the S, on all devices, of the all-reduces that its device has joined.

    An R or W need not wait for the message of its own F or I to arrive elsewhere: on its device that is in the past.
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


def _receives(bounds: list[int], steps: list[Step], waits: list[tuple[int, ...]]) -> list[float]:
    """A message is received once, by the first operation of its receiver that needs it."""
    receive = [0.0] * len(waits)
    received = bytearray(len(waits))
    for first, stop in pairwise(bounds):
        for number in range(first, stop):
            for needed in waits[number]:
                if needed < first or needed >= stop:
                    _, after, link = steps[needed]
                    if link >= 0 and not received[needed]:
                        received[needed] = True
                        receive[number] += after
    return receive
