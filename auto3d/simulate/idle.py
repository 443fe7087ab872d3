"""Idle times of devices, and the steady state of schedules whose iterations overlap."""

from dataclasses import dataclass

from auto3d.schedule.operation import Kind
from auto3d.simulate.simulate import Timeline


def busy(timeline: Timeline) -> list[float]:
    """Per device, the time spent in operations, without messages and gradient syncs."""
    return [
        sum(timeline.end[number] - timeline.start[number] for number in timeline.numbers(device))
        for device in range(timeline.schedule.devices)
    ]


def idle(timeline: Timeline) -> list[float]:
    """Per device, the idle time of an iteration that all devices begin and end together: makespan minus busy time."""
    return [timeline.makespan - time for time in busy(timeline)]


def idle_within(timeline: Timeline) -> list[float]:
    """Per device, the idle time between the start of its first operation and the end of its last operation.

    The zero-bubble papers count this way: the next iteration may begin on one device before this iteration ends on
    another.
    """
    idle_times = []
    for device, time in enumerate(busy(timeline)):
        numbers = timeline.numbers(device)
        idle_times.append(timeline.end[numbers[-1]] - timeline.start[numbers[0]] - time if numbers else 0.0)
    return idle_times


def bubble_ratio(timeline: Timeline) -> float:
    """The idle time of all devices divided by devices × makespan: between 0 and 1."""
    whole = timeline.schedule.devices * timeline.makespan
    return sum(idle(timeline)) / whole if whole else 0.0


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    iteration_time: float
    bubble_ratio: float


def steady_state(timeline: Timeline) -> SteadyState | None:
    """The steady state of overlapping iterations, between warm-up and drain; None for a schedule of one iteration.

    It is read from the iterations that end while every device still has forwards to run, from the later half of them.
    If there are fewer than two such iterations, it is read from the last two of all. These may end closer together than
    the work of a device allows, since the drain runs no forwards; the iteration time is therefore at least that work.
    """
    schedule = timeline.schedule
    if schedule.iterations < 2:
        return None
    per_iteration = schedule.micro_batches * schedule.parts
    ends = [0.0] * schedule.iterations
    last_forward = [0.0] * schedule.devices
    for device in range(schedule.devices):
        for number in timeline.numbers(device):
            operation = timeline.operations[number]
            if operation.kind is Kind.FORWARD:
                last_forward[device] = timeline.end[number]
            if operation.micro_batches:
                iteration = max(operation.micro_batches) // per_iteration
                ends[iteration] = max(ends[iteration], timeline.end[number])
    before_drain = [end for end in ends if end <= min(last_forward)]
    used = before_drain[(len(before_drain) - 1) // 2 :] if len(before_drain) > 1 else ends[-2:]
    work = [time / schedule.iterations for time in busy(timeline)]
    iteration_time = max((used[-1] - used[0]) / (len(used) - 1), *work)
    whole = schedule.devices * iteration_time
    return SteadyState(iteration_time=iteration_time, bubble_ratio=1 - sum(work) / whole if whole else 0.0)
