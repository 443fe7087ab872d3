"""Memory that follows from the order of operations alone, without times: activations in flight and weight copies.

Both are in units of one device's share of the model: with two stages per device, a stage counts one half.
"""

from auto3d.schedule.operation import Kind, Operation, Schedule


def peak_activations(schedule: Schedule) -> list[float]:
    """Per device, the most micro-batches whose activations it holds at a time: from F until B, or until W."""
    share = schedule.devices / (schedule.stages * schedule.parts)
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
    peaks = []
    for operations in schedule.operations:
        held = most = 0
        for operation in operations:
            held += change.get(operation.kind, 0) * len(operation.micro_batches)
            most = max(most, held)
        peaks.append(most * share)
    return peaks


def weight_copies(schedule: Schedule) -> list[float]:
    """Per device, the most weight versions it keeps at a time, over all replicas of all its stages."""
    share = schedule.devices / schedule.stages
    copies = [0.0] * schedule.devices
    for (stage, pipe), device in schedule.device_of.items():
        own = [o for o in schedule.operations[device] if (o.stage, o.pipe) == (stage, pipe)]
        copies[device] += share * (_most_versions(own, schedule.weight_version) if schedule.weight_version else 1)
    return copies


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
