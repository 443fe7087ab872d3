"""The bytes that each device of a timeline holds, counted from its operations: activations and weight versions."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from auto3d.schedule.operation import Kind
from auto3d.simulate.memory_timeline import BytesOverTime
from auto3d.simulate.simulate import Timeline
from auto3d.simulate.work import recomputed_inside


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes per stage."""

    activations: tuple[float, ...]  # one micro-batch: everything that its backward needs, with the input of the stage
    kept: tuple[float, ...]  # one micro-batch of a recomputing stage: its input and all that it does not recompute
    weights: tuple[float, ...]  # one version of the weights


def bytes_over_time(timeline: Timeline, sizes: Sizes) -> list[BytesOverTime]:
    """Per device, the bytes that it holds over time.

    Activations are held from the start of the forward until the end of the backward or, if that is split, of its weight
    half. A recomputing stage holds only its kept bytes until the recomputation starts. A weight version is held from
    the end of the update that makes it until there is a newer one and no later operation uses it; the first version is
    held from the start. At equal times, bytes are freed before others are allocated.
    """
    inside = recomputed_inside(timeline.schedule)
    return [
        _steps(_activations(timeline, sizes, device, inside) + _weights(timeline, sizes, device))
        for device in range(timeline.schedule.devices)
    ]


Change = tuple[float, float]  # (time, bytes allocated, or freed if below 0)


def _activations(timeline: Timeline, sizes: Sizes, device: int, inside: dict[int, int]) -> list[Change]:
    schedule = timeline.schedule
    split = {  # (stage, micro-batch) whose backward has a weight half
        (operation.stage, micro_batch)
        for operation in schedule.operations[device]
        if operation.kind is Kind.BACKWARD_WEIGHT
        for micro_batch in operation.micro_batches
    }
    changes = []
    for number in timeline.numbers(device):
        operation, start, end = timeline.operations[number], timeline.start[number], timeline.end[number]
        stage, micro_batches = operation.stage, len(operation.micro_batches) / schedule.parts
        full = sizes.activations[stage]
        kept = sizes.kept[stage] if stage in schedule.recompute else full
        if operation.kind is Kind.FORWARD:
            changes.append((start, micro_batches * kept))
        elif operation.kind is Kind.RECOMPUTE:
            changes.append((start, micro_batches * (full - kept)))
        elif number in inside:
            changes.append((start, inside[number] / schedule.parts * (full - kept)))
        if operation.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT) or (
            operation.kind is Kind.BACKWARD_INPUT and (stage, operation.micro_batches[0]) not in split
        ):
            changes.append((end, -micro_batches * full))
    return changes


def _weights(timeline: Timeline, sizes: Sizes, device: int) -> list[Change]:
    versions = timeline.schedule.weight_version
    last_use: dict[tuple[int, int, int], float] = {}  # (stage, pipe, version) -> end of its last operation
    made: defaultdict[tuple[int, int], list[float]] = defaultdict(list)  # (stage, pipe) -> ends of its updates
    for number in timeline.numbers(device):
        operation = timeline.operations[number]
        if operation.kind is Kind.UPDATE:
            made[operation.stage, operation.pipe].append(timeline.end[number])
        elif versions:
            for micro_batch in operation.micro_batches:
                used = versions[operation.stage, micro_batch]
                last_use[operation.stage, operation.pipe, used] = timeline.end[number]
    changes = []
    for (stage, pipe), home in timeline.schedule.device_of.items():
        if home == device:
            size = sizes.weights[stage]
            updates = made[stage, pipe]
            changes += [(time, size) for time in (0.0, *updates)]
            for version, replaced in enumerate(updates):
                changes.append((max(replaced, last_use.get((stage, pipe, version), 0.0)), -size))
    return changes


def _steps(changes: list[Change]) -> BytesOverTime:
    changes.sort()  # at equal times, freed bytes come first
    held = list(accumulate(change for _, change in changes))
    last_of_time = [
        index for index in range(len(changes)) if index + 1 == len(changes) or changes[index + 1][0] > changes[index][0]
    ]
    return BytesOverTime(times=[changes[i][0] for i in last_of_time], held=[held[i] for i in last_of_time])
