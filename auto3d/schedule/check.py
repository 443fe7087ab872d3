"""Proof, by walking through it, that a Schedule is right: complete, in order, free of deadlock."""

from collections import Counter

from auto3d.errors import InputError
from auto3d.schedule.operation import Kind, Operation, Schedule

_PER_MICRO_BATCH = (Kind.FORWARD, Kind.BACKWARD)


class ScheduleError(InputError):
    """A Schedule that would train wrongly, or never end; the message names the operation."""


def check(schedule: Schedule) -> None:
    """Raise ScheduleError unless ``schedule`` is right.

    Proved: every operation is on the device where its stage lives; every micro-batch passes every stage forward and
    backward exactly once; each stage is synced once, after its last backward, and updated once, after its sync; and all
    devices come to their end, in dependency order, even if sends are rendezvous.
    """
    _check_complete(schedule)
    _check_sync_and_update(schedule)
    _check_progress(schedule)


def _check_complete(schedule: Schedule) -> None:
    seen: Counter[tuple[Kind, int, int]] = Counter()
    for device, operations in enumerate(schedule.operations):
        for operation in operations:
            home = schedule.device_of.get((operation.stage, operation.pipe))
            if home != device:
                raise ScheduleError(f"{operation} is on device {device}; its stage lives on device {home}")
            if operation.kind not in (*_PER_MICRO_BATCH, Kind.SYNC, Kind.UPDATE):
                raise ScheduleError(f"{operation} on device {device}: kind {operation.kind} is not supported")
            seen.update((operation.kind, operation.stage, m) for m in operation.micro_batches)
    expected = {
        (k, s, m) for k in _PER_MICRO_BATCH for s in range(schedule.stages) for m in range(schedule.micro_batches)
    }
    for kind, stage, micro_batch in sorted(expected | seen.keys()):
        times = seen[kind, stage, micro_batch]
        if (kind, stage, micro_batch) not in expected:
            raise ScheduleError(f"{Operation(kind, stage, (micro_batch,))} is outside the schedule's sizes")
        if times != 1:
            raise ScheduleError(f"{Operation(kind, stage, (micro_batch,))} is done {times} times; it must be done once")


def _check_sync_and_update(schedule: Schedule) -> None:
    for (stage, pipe), device in schedule.device_of.items():
        kinds = [o.kind for o in schedule.operations[device] if (o.stage, o.pipe) == (stage, pipe)]
        tail = kinds[-2:]
        if tail != [Kind.SYNC, Kind.UPDATE] or kinds.count(Kind.SYNC) != 1 or kinds.count(Kind.UPDATE) != 1:
            raise ScheduleError(
                f"stage {stage} on device {device} ends with {' '.join(tail)}; "
                "it must end with its one S and then its one U, after its last backward"
            )
    for device, operations in enumerate(schedule.operations):
        kinds = [operation.kind for operation in operations]
        if Kind.UPDATE in kinds and Kind.SYNC in kinds[kinds.index(Kind.UPDATE) :]:
            raise ScheduleError(f"device {device} updates before its last S; the norm for clipping needs all gradients")


def _check_progress(schedule: Schedule) -> None:
    """Walk all devices in step. A device posts, together, the sends of the operation it ended and the receives of its
    next one, and goes on when both are met; a send is met when its receiver has posted the receive or is past it."""
    done: set[tuple[Kind, int, int]] = set()
    position = [0] * schedule.devices  # operations ended, per device
    unmet: list[list[tuple[Kind, int, int]]] = [[] for _ in range(schedule.devices)]  # sends not met yet
    consumer = {
        (operation.kind, operation.stage, m): (device, index)
        for device, operations in enumerate(schedule.operations)
        for index, operation in enumerate(operations)
        for m in operation.micro_batches
    }

    def sends(operation: Operation) -> list[tuple[Kind, int, int]]:
        if operation.kind is Kind.FORWARD and operation.stage + 1 < schedule.stages:
            return [(Kind.FORWARD, operation.stage + 1, m) for m in operation.micro_batches]
        if operation.kind is Kind.BACKWARD and operation.stage > 0:
            return [(Kind.BACKWARD, operation.stage - 1, m) for m in operation.micro_batches]
        return []

    def needs(operation: Operation) -> list[tuple[Kind, int, int]]:
        last = schedule.stages - 1
        if operation.kind is Kind.FORWARD and operation.stage > 0:
            return [(Kind.FORWARD, operation.stage - 1, m) for m in operation.micro_batches]
        if operation.kind is Kind.BACKWARD:
            own = [(Kind.FORWARD, operation.stage, m) for m in operation.micro_batches]
            after = [(Kind.BACKWARD, operation.stage + 1, m) for m in operation.micro_batches]
            return own + (after if operation.stage < last else [])
        return []

    moved = True
    while moved:
        moved = False
        for device, operations in enumerate(schedule.operations):
            while position[device] < len(operations):
                unmet[device] = [
                    send
                    for send in unmet[device]
                    if consumer[send][0] != device and position[consumer[send][0]] < consumer[send][1]
                ]
                operation = operations[position[device]]
                if unmet[device] or not done.issuperset(needs(operation)):
                    break
                done.update((operation.kind, operation.stage, m) for m in operation.micro_batches)
                position[device] += 1
                unmet[device] = sends(operation)
                moved = True

    stuck = [
        f"device {device} before {operations[position[device]]}"
        + (
            f" (its send to {', '.join(str(Operation(k, s, (m,))) for k, s, m in unmet[device])} is not met)"
            if unmet[device]
            else ""
        )
        for device, operations in enumerate(schedule.operations)
        if position[device] < len(operations)
    ]
    if stuck:
        raise ScheduleError(f"deadlock: {'; '.join(stuck)}")
