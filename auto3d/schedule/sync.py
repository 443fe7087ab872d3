"""Placement of gradient syncs (S) and updates (U) in the operations of a schedule.

The files in families/ list forwards, recomputations and backwards only. This pass adds one S and one U per update for
every stage on every pipe. A pipe without micro-batches has them too, since its copies of the weights are updated with
the others.
"""

from collections.abc import Sequence
from dataclasses import replace

from auto3d.schedule.advance import advance_devices
from auto3d.schedule.dependencies import bounds, dependencies
from auto3d.schedule.operation import BACKWARDS, Kind, Operation, Schedule
from auto3d.schedule.options import SYNC, check_choice

_NOT_RUN = -1


def place_syncs(schedule: Schedule, sync: str) -> Schedule:
    """``schedule`` with one S and one U per stage and pipe. All U of a device follow all its S: clipping needs the norm
    of all gradients.

    - ``lazy``: every S comes after the last operation of the device.
    - ``eager``: each S comes right after the last backward of its stage and pipe, so that it overlaps later operations.
    - ``eager-opt``: as eager, but only if the device waits at some time between that backward and its last operation.
      Otherwise an early sync only takes time from computing (Chimera, section 3.2).
    """
    check_choice(schedule.name, "sync", sync, SYNC)
    if sync == "eager-opt":
        last_waits = _last_waits(schedule)
    else:
        last_waits = [len(operations) if sync == "eager" else 0 for operations in schedule.operations]
    placed = []
    for device, operations in enumerate(schedule.operations):
        pipe_stages = [pipe_stage for pipe_stage, home in schedule.device_of.items() if home == device]
        last_backward = _last_backwards(operations, pipe_stages)
        pipe_stages.sort(key=last_backward.__getitem__)
        early = {
            last_backward[pipe_stage]: pipe_stage
            for pipe_stage in pipe_stages
            if 0 <= last_backward[pipe_stage] < last_waits[device]
        }
        with_syncs: list[Operation] = []
        placed_until = 0
        for index, (stage, pipe) in sorted(early.items()):
            with_syncs += operations[placed_until : index + 1]
            with_syncs.append(Operation(Kind.SYNC, stage, (), pipe))
            placed_until = index + 1
        with_syncs += operations[placed_until:]
        late = [pipe_stage for pipe_stage in pipe_stages if pipe_stage not in early.values()]
        with_syncs += [Operation(Kind.SYNC, stage, (), pipe) for stage, pipe in late]
        with_syncs += [Operation(Kind.UPDATE, stage, (), pipe) for stage, pipe in pipe_stages]
        placed.append(tuple(with_syncs))
    return replace(schedule, operations=tuple(placed))


def _last_backwards(
    operations: Sequence[Operation], pipe_stages: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], int]:
    """(stage, pipe) -> the index of its last backward among ``operations``; -1 if it has none."""
    last = dict.fromkeys(pipe_stages, -1)
    missing = len(last)
    for index in reversed(range(len(operations))):
        if not missing:
            break
        kind, stage, _, pipe = operations[index]
        if kind in BACKWARDS and last.get((stage, pipe), index) < 0:
            last[stage, pipe] = index
            missing -= 1
    return last


def place_updates(schedule: Schedule, sync: str, *, every: int) -> Schedule:
    """An asynchronous ``schedule`` with the S and U of a stage right after every ``every``-th backward of that stage.

    An update reads the gradients that the next backward adds to, so it cannot be delayed: ``lazy``, ``eager`` and
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
    """Per device, the index of the last operation before which it waits (0: none).

    A backward takes two units of time, any other operation one.
    """
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
