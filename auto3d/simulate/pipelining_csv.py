"""A schedule as the CSV that torch.distributed.pipelining loads: one line per rank, one cell per action such as 0F3."""

import csv
import io

from auto3d.errors import InputError
from auto3d.schedule.operation import Kind, Schedule


def pipelining_csv(schedule: Schedule) -> str:
    """The text that ``_PipelineScheduleRuntime._load_csv(file, format="compute_only")`` of torch 2.13 reads.

    torch adds sends and receives, and gradient syncs at the end, so syncs and updates are left out. Raises InputError
    if this format cannot express the schedule.
    """
    obstacle = _obstacle(schedule)
    if obstacle:
        raise InputError(f"schedule {schedule.name}: the CSV of torch.distributed.pipelining cannot express {obstacle}")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for operations in schedule.operations:
        actions = (o for o in operations if o.kind not in (Kind.SYNC, Kind.UPDATE))
        writer.writerow([f"{o.stage}{o.kind}{o.micro_batches[0]}" for o in actions])
    return text.getvalue()


def _obstacle(schedule: Schedule) -> str:
    operations = [operation for device in schedule.operations for operation in device]
    pipes = len({pipe for _, pipe in schedule.device_of})
    if pipes > 1:
        return f"more than one pipe; it has {pipes} pipes"
    if schedule.recompute or any(operation.kind is Kind.RECOMPUTE for operation in operations):
        return "recomputation; use activation checkpointing inside the stages instead"
    if schedule.parts > 1 or any(len(operation.micro_batches) > 1 for operation in operations):
        return "operations on other than one whole micro-batch"
    if schedule.iterations > 1:
        return f"iterations that overlap; it has {schedule.iterations} iterations"
    return ""
