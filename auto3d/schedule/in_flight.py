"""The activations in flight on each device and stage, counted from the order of operations, without times.

A micro-batch is in flight on a stage from its forward until its backward or, if the backward is split, until its weight
half.
"""

from itertools import chain

from auto3d.schedule.operation import Kind, Schedule

_CHANGE = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}  # change of the number in flight


def peak_activations(schedule: Schedule) -> list[float]:
    """Per device, the peak of the activations that it holds, in micro-batches.

    The unit is a micro-batch on all stages of a device with one pipe: with two stages per device, a stage counts 1/2.
    """
    unit = schedule.devices / (schedule.stages * schedule.parts)
    peaks = []
    for operations in schedule.operations:
        held = most = 0
        for operation in operations:
            held += _CHANGE.get(operation.kind, 0) * len(operation.micro_batches)
            most = max(most, held)
        peaks.append(most * unit)
    return peaks


def in_flight(schedule: Schedule) -> list[int]:
    """Per stage, the peak number of micro-batches, or of parts of them, in flight on one pipe."""
    most = [0] * schedule.stages
    held = dict.fromkeys(schedule.device_of, 0)
    change_of = _CHANGE.get
    for operation in chain.from_iterable(schedule.operations):
        if change := change_of(operation.kind):
            stage = operation.stage
            pipe_stage = stage, operation.pipe
            held[pipe_stage] = now = held[pipe_stage] + change * len(operation.micro_batches)
            if now > most[stage]:
                most[stage] = now
    return most
