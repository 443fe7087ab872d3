"""A schedule in the CSV form that torch.distributed.pipelining loads: a line per rank, a cell per action, as in 0F3."""

import csv
import io

from auto3d.errors import InputError
from auto3d.schedule.operation import Kind, Schedule


def pipelining_csv(schedule: Schedule) -> str:
    """What ``_PipelineScheduleRuntime._load_csv(file, format="compute_only")`` of torch 2.13 reads.

    It adds sends and receives, and gradient syncs at the end, by itself: syncs and updates are left out. Raises
    InputError where that form cannot hold the schedule.
    """
    obstacle = _obstacle(schedule)
    if obstacle:
        raise InputError(f"schedule {schedule.name}: torch.distributed.pipelining's CSV cannot hold {obstacle}")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for operations in schedule.operations:
        actions = (o for o in operations if o.kind not in (Kind.SYNC, Kind.UPDATE))
        writer.writerow([f"{o.stage}{o.kind}{o.micro_batches[0]}" for o in actions])
    return text.getvalue()


def _obstacle(schedule: Schedule) -> str:
    operations = [operation for own in schedule.operations for operation in own]
    pipes = len({pipe for _, pipe in schedule.device_of})
    if pipes > 1:
        return f"several replicas of the model (there are {pipes} pipes)"
    if schedule.recompute or any(operation.kind is Kind.RECOMPUTE for operation in operations):
        return "recomputation; checkpoint inside the stages instead"
    if schedule.parts > 1 or any(len(operation.micro_batches) > 1 for operation in operations):
        return "operations over anything but one whole micro-batch"
    if schedule.iterations > 1:
        return f"iterations that overlap (there are {schedule.iterations})"
    return ""
