"""The number of weight versions that stages and devices keep: more than one per stage if iterations overlap."""

from auto3d.schedule.operation import Kind, Operation, Schedule


def weight_copies(schedule: Schedule) -> list[float]:
    """Per device, the peak of the weight versions of all its stages on all pipes.

    The unit is the weights of 1/D of the model: with two stages per device, a version of one stage counts 1/2.
    """
    unit = schedule.devices / schedule.stages
    copies = [0.0] * schedule.devices
    for pipe_stage, count in weight_versions(schedule).items():
        copies[schedule.device_of[pipe_stage]] += unit * count
    return copies


def weight_versions(schedule: Schedule) -> dict[tuple[int, int], int]:
    """(stage, pipe) -> the peak number of weight versions that the stage keeps for this pipe."""
    most = dict.fromkeys(schedule.device_of, 1)
    for (stage, pipe), device in schedule.device_of.items() if schedule.weight_version else ():
        operations = [o for o in schedule.operations[device] if (o.stage, o.pipe) == (stage, pipe)]
        most[stage, pipe] = _most_versions(operations, schedule.weight_version)
    return most


def _most_versions(operations: list[Operation], version: dict[tuple[int, int], int]) -> int:
    """The peak number of versions alive: the newest, and versions that the current or a later operation uses."""
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
