"""Where the gradient syncs and the updates stand in a schedule's lists.

Families list forwards, recomputations and backwards only; this pass adds one S and one U per update to every replica
(stage, pipe), also to a pipe that carries no micro-batch, since its weights take part in the others' update.
"""

from dataclasses import replace

from auto3d.schedule.advance import advance_devices
from auto3d.schedule.dependencies import bounds, dependencies
from auto3d.schedule.operation import BACKWARDS, Kind, Operation, Schedule
from auto3d.schedule.options import SYNC, check_choice

_NOT_RUN = -1


def place_syncs(schedule: Schedule, sync: str) -> Schedule:
    """``schedule`` with one S per replica, and after all of a device's S, its U: clipping needs the norm of all.

    - ``lazy``: every S after the device's last operation.
    - ``eager``: each S right after its replica's last backward, so that it overlaps what follows.
    - ``eager-opt``: eager only where the device waits at some time between that backward and its last operation. Where
      it does not, an early sync only takes time from computing (Chimera, section 3.2).
    """
    check_choice(schedule.name, "sync", sync, SYNC)
    if sync == "eager-opt":
        last_waits = _last_waits(schedule)
    else:
        last_waits = [len(operations) if sync == "eager" else 0 for operations in schedule.operations]
    placed = []
    for device, operations in enumerate(schedule.operations):
        last = {replica: -1 for replica, home in schedule.device_of.items() if home == device}  # backward's index
        for index, operation in enumerate(operations):
            if operation.kind in BACKWARDS:
                last[operation.stage, operation.pipe] = index
        replicas = sorted(last, key=lambda replica: last[replica])
        early = {last[replica]: replica for replica in replicas if 0 <= last[replica] < last_waits[device]}
        with_syncs: list[Operation] = []
        for index, operation in enumerate(operations):
            with_syncs.append(operation)
            if index in early:
                stage, pipe = early[index]
                with_syncs.append(Operation(Kind.SYNC, stage, (), pipe))
        late = [replica for replica in replicas if replica not in early.values()]
        with_syncs += [Operation(Kind.SYNC, stage, (), pipe) for stage, pipe in late]
        with_syncs += [Operation(Kind.UPDATE, stage, (), pipe) for stage, pipe in replicas]
        placed.append(tuple(with_syncs))
    return replace(schedule, operations=tuple(placed))


def place_updates(schedule: Schedule, sync: str, *, every: int) -> Schedule:
    """An asynchronous ``schedule`` with S and U of a stage right after each ``every`` backwards of it.

    The update reads the gradients that the next backward would add to, so it cannot be put off; ``lazy``, ``eager`` and
    ``eager-opt`` mean the same here.
    """
    check_choice(schedule.name, "sync", sync, SYNC)
    placed = []
    for operations in schedule.operations:
        with_updates: list[Operation] = []
        backwards = 0
        for operation in operations:
            with_updates.append(operation)
            if operation.kind in BACKWARDS:
                backwards += 1
                if backwards % every == 0:
                    with_updates += [Operation(Kind.SYNC, operation.stage), Operation(Kind.UPDATE, operation.stage)]
        placed.append(tuple(with_updates))
    return replace(schedule, operations=tuple(placed))


def _last_waits(schedule: Schedule) -> list[int]:
    """Per device, the index of the last operation that it waits for (0: none), if B takes two units, all else one."""
    needs = dependencies(schedule)
    first = bounds(schedule)
    ends = [_NOT_RUN] * first[-1]
    clock, last_waits = [0] * schedule.devices, [0] * schedule.devices

    def run_next(device: int, index: int) -> bool:
        begin = clock[device]
        for need in needs[first[device] + index]:
            end = ends[need]
            if end == _NOT_RUN:
                return False
            if end > begin:
                begin = end
        if begin > clock[device]:
            last_waits[device] = index
        operation = schedule.operations[device][index]
        units = 2 if operation.kind is Kind.BACKWARD else 1
        clock[device] = ends[first[device] + index] = begin + units * len(operation.micro_batches)
        return True

    advance_devices([0] * schedule.devices, [len(operations) for operations in schedule.operations], run_next)
    return last_waits
