"""The simulation of devices that share the processors of a machine and so slow each other down."""

from math import inf

from auto3d.simulate.costs import Costs
from auto3d.simulate.work import DeviceWork

Run = tuple[list[float], list[float], list[float], list[int]]
"""Start, end and arrival of the message per operation (arrival -1: it never ran), and per device its next operation."""


def run_shared(work: DeviceWork, costs: Costs) -> Run:
    """Run each device's operations in order, each as soon as its device is free and its inputs have arrived.

    Time advances from event to event: each start or end of an operation changes the speed of all others on its machine.
    The time of messages and all-reduces does not depend on what is computed.
    """
    bounds, waits = work.numbered.bounds, work.numbered.waits
    count, stops = len(work.steps), bounds[1:]
    start, end, arrival = [0.0] * count, [0.0] * count, [-1.0] * count
    position, free, link_free = [*bounds[:-1]], [0.0] * len(stops), [0.0] * len(work.links)
    sync_free = [0.0] * len(stops)
    remaining: dict[int, float] = {}  # device -> remaining seconds of its operation if nothing slows it down
    now = 0.0
    while True:
        wake = inf  # the next time at which a device that waits for a message can go on
        for device, number in enumerate(position):
            if device in remaining or number == stops[device]:
                continue
            needed = [arrival[earlier] for earlier in waits[number]]
            if min(needed, default=0.0) < 0.0:
                continue
            begin = max(needed, default=0.0)
            begin = max(begin, free[device]) + (work.receive[number] if work.receive else 0.0)
            if begin > now:
                wake = min(wake, begin)
                continue
            start[number], remaining[device] = now, work.steps[number][0]
        if not remaining and wake == inf:
            return start, end, arrival, position
        slowdown = {device: _slowdown(costs, device, remaining) for device in remaining}
        step = min([wake - now, *(seconds * slowdown[device] for device, seconds in remaining.items())])
        ended = [device for device, seconds in remaining.items() if seconds * slowdown[device] <= step]
        now += step
        remaining = {d: seconds - step / slowdown[d] for d, seconds in remaining.items() if d not in ended}
        for device in ended:
            number = position[device]
            position[device] += 1
            end[number] = arrival[number] = free[device] = now
            _, after, link, lead = work.steps[number]
            if after and link < 0:
                arrival[number] = sync_free[device] = max(now, sync_free[device]) + after
            elif after and costs.overlap:
                arrival[number] = link_free[link] = max(now - lead, link_free[link]) + after
            elif after:
                free[device] = now + after


def _slowdown(costs: Costs, device: int, computing: dict[int, float]) -> float:
    """The slowdown of ``device`` on the machine that slows its processes most; ``computing`` as ``remaining`` above."""
    return max(
        (
            machine.slowdown_of(sum(machine.processes[other] for other, seconds in computing.items() if seconds > 0))
            for machine in costs.shared_machines
            if machine.processes[device]
        ),
        default=1.0,
    )
