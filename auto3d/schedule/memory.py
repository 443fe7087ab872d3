"""Memory that follows from the order of operations alone, without times: activations in flight and weight copies.

Both are in units of one device's share of the model: with two stages per device, a stage counts one half.
"""

from itertools import chain

from auto3d.schedule.operation import Kind, Operation, Schedule

_CHANGE = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}  # of the micro-batches in flight


def peak_activations(schedule: Schedule) -> list[float]:
    """Per device, the most micro-batches whose activations it holds at a time: from F until B, or until W."""
    share = schedule.devices / (schedule.stages * schedule.parts)
    peaks = []
    for operations in schedule.operations:
        held = most = 0
        for operation in operations:
            held += _CHANGE.get(operation.kind, 0) * len(operation.micro_batches)
            most = max(most, held)
        peaks.append(most * share)
    return peaks


def in_flight(schedule: Schedule) -> list[int]:
    """Per stage, the most micro-batches, or parts of them, whose activations one of its replicas holds at a time."""
    most = [0] * schedule.stages
    held = dict.fromkeys(schedule.device_of, 0)
    for operation in chain.from_iterable(schedule.operations):
        replica = operation.stage, operation.pipe
        held[replica] += _CHANGE.get(operation.kind, 0) * len(operation.micro_batches)
        most[operation.stage] = max(most[operation.stage], held[replica])
    return most


def weight_copies(schedule: Schedule) -> list[float]:
    """Per device, the most weight versions it keeps at a time, over all replicas of all its stages."""
    share = schedule.devices / schedule.stages
    copies = [0.0] * schedule.devices
    for replica, count in versions(schedule).items():
        copies[schedule.device_of[replica]] += share * count
    return copies


def versions(schedule: Schedule) -> dict[tuple[int, int], int]:
    """(stage, pipe) -> the most weight versions that this replica keeps at a time."""
    found = dict.fromkeys(schedule.device_of, 1)
    for (stage, pipe), device in schedule.device_of.items() if schedule.weight_version else ():
        own = [o for o in schedule.operations[device] if (o.stage, o.pipe) == (stage, pipe)]
        found[stage, pipe] = _most_versions(own, schedule.weight_version)
    return found


def _most_versions(operations: list[Operation], version: dict[tuple[int, int], int]) -> int:
    """The most versions alive at a time: the newest, and those that this or a later operation uses."""
    last_use: dict[int, int] = {}
    for index, operation in enumerate(operations):
        for m in operation.micro_batches:
            last_use[version[operation.stage, m]] = index
    newest = 0
    alive = {0}
    most = 1
    for index, operation in enumerate(operations):
        if operation.kind is Kind.UPDATE:
            newest += 1
            alive.add(newest)
        alive = {v for v in alive if v == newest or last_use.get(v, -1) >= index}
        most = max(most, len(alive))
    return most
