"""How many versions of its weights each stage keeps at a time: more than one where iterations overlap."""

from auto3d.schedule.operation import Kind, Operation, Schedule


def weight_copies(schedule: Schedule) -> list[float]:
    """Per device, the most weight versions it keeps at a time, over all replicas of all its stages."""
    share = schedule.devices / schedule.stages
    copies = [0.0] * schedule.devices
    for replica, count in weight_versions(schedule).items():
        copies[schedule.device_of[replica]] += share * count
    return copies


def weight_versions(schedule: Schedule) -> dict[tuple[int, int], int]:
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
