"""When operations start and end whose devices share a machine's processors, and so slow each other down."""

from math import inf

from auto3d.simulate.costs import Costs
from auto3d.simulate.work import DeviceWork

Run = tuple[list[float], list[float], list[float], list[int]]
"""By operation its start, its end, and the arrival of its message, -1 where it never ran; and how far devices came."""


def run_shared(work: DeviceWork, costs: Costs) -> Run:
    """Run each device's operations in order, each as soon as its device is free and its inputs are there.

    From event to event: the start or the end of an operation changes how fast all others advance on its machine.
    Messages and all-reduces take their time whatever is computed.
    """
    count, stops = len(work.steps), work.bounds[1:]
    start, end, arrival = [0.0] * count, [0.0] * count, [-1.0] * count
    position, free, link_free = work.bounds[:-1], [0.0] * len(stops), [0.0] * len(work.links)
    sync_free = [0.0] * len(stops)
    left: dict[int, float] = {}  # device -> seconds that its operation still takes where nothing slows it down
    now = 0.0
    while True:
        wake = inf  # when the next device that waits for a message can go on
        for device, number in enumerate(position):
            if device in left or number == stops[device]:
                continue
            needed = [arrival[earlier] for earlier in work.waits[number]]
            if min(needed, default=0.0) < 0.0:
                continue
            begin = max(needed, default=0.0)
            begin = max(begin, free[device]) + (work.receive[number] if work.receive else 0.0)
            if begin > now:
                wake = min(wake, begin)
                continue
            start[number], left[device] = now, work.steps[number][0]
        if not left and wake == inf:
            return start, end, arrival, position
        slowdown = {device: _slowdown(costs, device, left) for device in left}
        step = min([wake - now, *(seconds * slowdown[device] for device, seconds in left.items())])
        ended = [device for device, seconds in left.items() if seconds * slowdown[device] <= step]
        now += step
        left = {d: seconds - step / slowdown[d] for d, seconds in left.items() if d not in ended}
        for device in ended:
            number = position[device]
            position[device] += 1
            end[number] = arrival[number] = free[device] = now
            _, after, link = work.steps[number]
            if after and link < 0:
                arrival[number] = sync_free[device] = max(now, sync_free[device]) + after
            elif after and costs.overlap:
                arrival[number] = link_free[link] = max(now, link_free[link]) + after
            elif after:
                free[device] = now + after


def _slowdown(costs: Costs, device: int, computing: dict[int, float]) -> float:
    """Of ``device``, on the machine of its processes that slows it most."""
    return max(
        (
            machine.slowdown_of(sum(machine.processes[other] for other, seconds in computing.items() if seconds > 0))
            for machine in costs.shared_machines
            if machine.processes[device]
        ),
        default=1.0,
    )
