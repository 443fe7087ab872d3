"""When a rank may post a receive or begin a sum over ranks, so that no rank can block another for ever.

Both give the device work that does not end before other ranks do their part: with NCCL it is a kernel that spins.
Where hardware queues are few, or something waits for all of the device's work, it blocks whatever comes after it. So
all steps of all devices get one order. A receive is posted, and a sum begun, only after all own steps that come in this
order before the step which sends the message, or which is the last to be ready for the sum. Each device then goes
through its part of one common sequence, in which every send stands beside its receive: no device waits for ever, even
if it does one thing at a time. ``check_progress`` proves that for the programs at hand.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from auto3d.schedule.check import ScheduleError
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.program import Communication, GradientSum, LossSum, Message, PipeStage, Program

Order = Sequence[Sequence[int]]  # [device][step]: its place in the order of all steps


def common_order(ends: Sequence[tuple[int, int]], devices: int) -> Order:
    """By the ends of steps; ``ends`` has (end, device) of each, in an order in which they can run.

    Any order in which the steps can run is right. That of their ends has receives posted as early as can be: when the
    message is sent, the device may be in the midst of an operation, before which they should have been posted.
    """
    places: list[list[int]] = [[] for _ in range(devices)]
    for place, number in enumerate(sorted(range(len(ends)), key=lambda number: ends[number][0])):
        places[ends[number][1]].append(place)
    return places


def beginnings(
    schedule: Schedule,
    sends: Sequence[Sequence[Sequence[Message]]],
    order: Order,
    shared: Collection[tuple[int, ...]],
) -> list[list[tuple[Communication, ...]]]:
    """Per device and step, what begins before it: receives of what ``sends`` has, by device and step, and sums.

    ``shared`` are the sets of stages whose gradients are summed over ranks.
    """
    # The place of the last step that each needs, and the devices that take part.
    ready: list[tuple[int, Communication, Collection[int]]] = []
    for device, steps in enumerate(sends):
        for place, messages in zip(order[device], steps, strict=True):
            targets = [schedule.device_of[message.target, message.pipe] for message in messages]
            ready += [(place, m, {target}) for m, target in zip(messages, targets, strict=True) if target != device]
    syncs, updates = _places(schedule, order, Kind.SYNC), _places(schedule, order, Kind.UPDATE)
    for stages in sorted(shared):
        users = {replica: places for replica, places in syncs.items() if replica[0] in stages}
        devices = {schedule.device_of[replica] for replica in users}
        for update, places in enumerate(zip(*users.values(), strict=True)):
            ready.append((max(places), GradientSum(stages, update), devices))
    if schedule.weight_version:
        for iteration in range(schedule.iterations):
            last = (iteration + 1) * schedule.updates - 1
            place = max(places[last] for places in updates.values())
            ready.append((place, LossSum(iteration), range(schedule.devices)))
    begun: list[list[list[Communication]]] = [[[] for _ in steps] for steps in sends]
    for place, beginning, devices in sorted(ready, key=lambda one: one[0]):
        for device in devices:
            step = bisect(order[device], place)
            if step < len(begun[device]):  # else it is a sum of losses after the last step
                begun[device][step].append(beginning)
    return [[tuple(each) for each in steps] for steps in begun]


def _places(schedule: Schedule, order: Order, kind: Kind) -> dict[PipeStage, list[int]]:
    """In ``order``, of each replica's operations of ``kind``."""
    places: dict[PipeStage, list[int]] = {replica: [] for replica in schedule.device_of}
    for device, operations in enumerate(schedule.operations):
        for place, operation in zip(order[device], operations, strict=True):
            if operation.kind is kind:
                places[operation.stage, operation.pipe].append(place)
    return places


def check_progress(programs: Sequence[Program], device_of: Mapping[PipeStage, int]) -> None:
    """Raise ScheduleError unless all ``programs`` end where each device does one thing at a time.

    Such a device waits at each post for the send, at each send for the post, and at each sum for all that take part. A
    real one, which waits for less, ends too.
    """
    sequences: list[list[Communication]] = []
    members: defaultdict[Communication, set[int]] = defaultdict(set)
    for device, program in enumerate(programs):
        sequence: list[Communication] = []
        known: set[Message] = set()
        for step in program.steps:
            sequence += step.begins
            known.update(step.posts)
            if missing := [m for m in step.receives if m not in known]:
                raise ScheduleError(f"{step.operation} uses {missing[0]}, which was neither posted nor made there")
            for message in step.sends:
                if device_of[message.target, message.pipe] == device:
                    known.add(message)
                else:
                    sequence.append(message)
        sequences.append(sequence)
        for one in sequence:
            members[one].add(device)
    for one, devices in members.items():
        if isinstance(one, Message) and len(devices) < 2:
            raise ScheduleError(f"{one} is sent and not posted, or posted and not sent")
    done = [0] * len(programs)
    arrived: defaultdict[Communication, set[int]] = defaultdict(set)
    moving = list(range(len(programs)))
    while moving:
        device = moving.pop()
        if done[device] < len(sequences[device]):
            one = sequences[device][done[device]]
            arrived[one].add(device)
            if arrived[one] == members[one]:
                moving += members[one]
                for member in members[one]:
                    done[member] += 1
    stuck = [device for device, sequence in enumerate(sequences) if done[device] < len(sequence)]
    if stuck:
        told = ", ".join(f"device {device} at {sequences[device][done[device]]}" for device in stuck)
        raise ScheduleError(f"deadlock if a device does one thing at a time: {told}")
