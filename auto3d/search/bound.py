"""A lower bound of a plan's simulated time, computed without simulating it, so that a search can skip plans."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from auto3d.schedule import SCHEDULES
from auto3d.schedule.shape import Shape
from auto3d.simulate.costs import Costs

_ROUNDING = 1 - 1e-9  # the simulator adds the same times in a different order


def least_s(shape: Shape, costs: Costs) -> float:
    """A lower bound of the seconds of an iteration.

    A device works on all micro-batches of its stages, and cannot begin before the first has come to it from stage 0. If
    backwards are not split, the gradient of its last backward still has to reach stage 0, whose sync and update follow.
    With slices, the first to arrive is the first slice of a micro-batch, and so is the last whose gradient leaves.

    If several pipes use the same devices, or the schedule is asynchronous, the bound is the mean work of a device.
    """
    again = [time if stage in shape.recompute else 0.0 for stage, time in enumerate(costs.recompute)]
    once = [sum(parts) for parts in zip(costs.forward, costs.backward, again, strict=True)]
    if len(shape.device_of) > shape.stages or SCHEDULES[shape.name].asynchronous:
        return _ROUNDING * shape.micro_batches * sum(once) / shape.devices
    up = [0.0, *(link.latency + link.forward / shape.parts for link in costs.messages)]
    down = [0.0, *(link.latency + link.backward / shape.parts for link in costs.messages)]
    forward = [0.0, *_first_parts(costs.forward, costs.forward_of_slice, shape.parts)[:-1]]
    backward = [0.0, *_first_parts(costs.backward, costs.backward_of_slice, shape.parts)[:-1]]
    fill = list(accumulate(message + time for message, time in zip(up, forward, strict=True)))
    drain = list(accumulate(message + time for message, time in zip(down, backward, strict=True)))
    stages_of: list[list[int]] = [[] for _ in range(shape.devices)]
    for (stage, _), device in shape.device_of.items():
        stages_of[device].append(stage)
    best = 0.0
    for own in stages_of:
        worked = min(fill[stage] for stage in own) + shape.micro_batches * sum(once[stage] for stage in own)
        best = max(best, worked + sum(costs.update[stage] for stage in own))
        if len(own) == 1:
            best = max(best, worked + costs.sync[own[0]] + costs.update[own[0]])
        if not shape.split:
            least = min(drain[stage] for stage in own)
            best = max(best, worked + least + costs.sync[0] + costs.update[0])
    return _ROUNDING * best


def least_of_any_order_s(shape: Shape, costs: Costs) -> float:
    """A lower bound of the seconds of an iteration with any order of operations on the stages and devices of ``shape``.

    Any stage may split its backward, and no stage has to recompute.
    """
    return least_s(replace(shape, recompute=frozenset(), split=frozenset(range(shape.stages))), costs)


def _first_parts(whole: Sequence[float], of_slice: Sequence[Sequence[float]], parts: int) -> list[float]:
    """Per stage, the time of the first part of a micro-batch that takes the times ``whole``."""
    return [times[0] for times in of_slice] or [time / parts for time in whole]
