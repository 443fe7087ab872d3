"""The points at which ranks post receives and start sums over ranks, chosen so that no rank blocks another for ever.

Both give an accelerator work that does not end until other ranks do their part: with NCCL, a kernel that spins. If
hardware queues are few, or if something waits for all work of the accelerator, such a kernel blocks all later work.
Therefore all steps of all devices get one common order. A device posts a receive only after all its steps that come, in
this order, before the step that sends the message. It starts a sum only after all its steps that come before the last
step that the sum needs. Each device then follows one common sequence in which every send stands next to its receive, so
no device waits for ever, even if it does one thing at a time. ``check_progress`` proves that for given programs.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from auto3d.schedule.check import ScheduleError
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.program import Communication, GradientSum, LossSum, Message, PipeStage, Program

Places = Sequence[Sequence[int]]  # [device][step]: the place of the step in the common order


def common_order(ends: Sequence[tuple[int, int]], devices: int) -> Places:
    """The steps of all devices, ordered by the time at which they end.

    ``ends`` has (end, device) of each step, in an order in which the steps can run. Any such order would be correct.
    The order of the ends posts receives as early as possible: when a message is sent, its receiver may be in the middle
    of an operation, and should have posted the receive before that operation.
    """
    places: list[list[int]] = [[] for _ in range(devices)]
    for place, number in enumerate(sorted(range(len(ends)), key=lambda number: ends[number][0])):
        places[ends[number][1]].append(place)
    return places


def communications_before(
    schedule: Schedule,
    sends: Sequence[Sequence[Sequence[Message]]],
    places: Places,
    summed: Collection[tuple[int, ...]],
) -> list[list[tuple[Communication, ...]]]:
    """Per device and step, the receives to post and the sums to start before that step.

    ``sends`` has the messages that each step of each device sends. ``summed`` has the sets of stages whose gradients
    are summed over ranks.
    """
    # (place of the last step that the communication needs, the communication, the devices that take part)
    ready: list[tuple[int, Communication, Collection[int]]] = []
    for device, steps in enumerate(sends):
        for place, messages in zip(places[device], steps, strict=True):
            targets = [schedule.device_of[message.target, message.pipe] for message in messages]
            ready += [(place, m, {target}) for m, target in zip(messages, targets, strict=True) if target != device]
    syncs, updates = _places_of(Kind.SYNC, schedule, places), _places_of(Kind.UPDATE, schedule, places)
    for stages in sorted(summed):
        users = {pipe_stage: of_syncs for pipe_stage, of_syncs in syncs.items() if pipe_stage[0] in stages}
        holders = {schedule.device_of[pipe_stage] for pipe_stage in users}
        for update, of_syncs in enumerate(zip(*users.values(), strict=True)):
            ready.append((max(of_syncs), GradientSum(stages, update), holders))
    if schedule.weight_version:
        for iteration in range(schedule.iterations):
            last = (iteration + 1) * schedule.updates - 1
            place = max(of_updates[last] for of_updates in updates.values())
            ready.append((place, LossSum(iteration), range(schedule.devices)))
    before: list[list[list[Communication]]] = [[[] for _ in steps] for steps in sends]
    for place, communication, devices in sorted(ready, key=lambda entry: entry[0]):
        for device in devices:
            step = bisect(places[device], place)
            if step < len(before[device]):  # otherwise it is a sum of losses after the last step
                before[device][step].append(communication)
    return [[tuple(communications) for communications in steps] for steps in before]


def _places_of(kind: Kind, schedule: Schedule, places: Places) -> dict[PipeStage, list[int]]:
    """Per stage and pipe, the places of its operations of ``kind``."""
    of_kind: dict[PipeStage, list[int]] = {pipe_stage: [] for pipe_stage in schedule.device_of}
    for device, operations in enumerate(schedule.operations):
        for place, operation in zip(places[device], operations, strict=True):
            if operation.kind is kind:
                of_kind[operation.stage, operation.pipe].append(place)
    return of_kind


def check_progress(programs: Sequence[Program], device_of: Mapping[PipeStage, int]) -> None:
    """Raise ScheduleError unless all ``programs`` end even if each device does one thing at a time.

    Such a device waits at each post for the send, at each send for the post, and at each sum for all that take part. A
    real device waits for less, so its program ends too.
    """
    sequences: list[list[Communication]] = []
    members: defaultdict[Communication, set[int]] = defaultdict(set)
    for device, program in enumerate(programs):
        sequence: list[Communication] = []
        known: set[Message] = set()  # messages that were posted, or sent by the device to itself
        for step in program.steps:
            sequence += step.begins
            known.update(step.posts)
            if missing := [m for m in step.receives if m not in known]:
                raise ScheduleError(f"{step.operation} uses {missing[0]}, which its device neither receives nor makes")
            for message in step.sends:
                if device_of[message.target, message.pipe] == device:
                    known.add(message)
                else:
                    sequence.append(message)
        sequences.append(sequence)
        for communication in sequence:
            members[communication].add(device)
    for communication, devices in members.items():
        if isinstance(communication, Message) and len(devices) < 2:
            raise ScheduleError(f"{communication} is sent but not received, or received but not sent")
    done = [0] * len(programs)
    arrived: defaultdict[Communication, set[int]] = defaultdict(set)
    moving = list(range(len(programs)))
    while moving:
        device = moving.pop()
        if done[device] < len(sequences[device]):
            communication = sequences[device][done[device]]
            arrived[communication].add(device)
            if arrived[communication] == members[communication]:
                moving += members[communication]
                for member in members[communication]:
                    done[member] += 1
    stuck = [device for device, sequence in enumerate(sequences) if done[device] < len(sequence)]
    if stuck:
        where = ", ".join(f"device {device} at {sequences[device][done[device]]}" for device in stuck)
        raise ScheduleError(f"deadlock if a device does one thing at a time: {where}")
