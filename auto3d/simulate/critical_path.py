"""The operations that decide how long an iteration takes (Chimera, section 3.4)."""

from auto3d.schedule.operation import BACKWARDS, Kind, Operation
from auto3d.simulate.simulate import Timeline

_CLOSE = 1e-9  # fraction of the makespan; times that differ by less are equal sums, added in another order


def critical_path(timeline: Timeline) -> list[Operation]:
    """The operations of a path without slack from the first start to the makespan.

    Each operation starts when the previous operation ends, or when its message or its all-reduce does. If there are
    several paths, this is a path with the most backwards, so that C_f and C_b are the paper's. Among these, it stays on
    a device if it can, as in figure 4 of Merak (2022).
    """
    numbers = critical_numbers(timeline)
    return [timeline.operations[number] for number in numbers]


def count(path: list[Operation]) -> tuple[int, int]:
    """(C_f, C_b): the forwards and backwards on ``path``; a split backward counts if its input half is on it."""
    forwards = sum(operation.kind is Kind.FORWARD for operation in path)
    return forwards, sum(operation.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) for operation in path)


def critical_numbers(timeline: Timeline) -> list[int]:
    """The critical path as the numbers of its operations; see ``critical_path``."""
    if not timeline.operations:
        return []
    work, start, arrival = timeline.work, timeline.start, timeline.arrival
    close = _CLOSE * timeline.makespan
    first_of_device = set(work.numbered.bounds)
    backwards = [0] * len(start)  # number of backwards on the best path that ends with each operation
    before = [-1] * len(start)  # previous operation on that path
    # Messages on one link, and all-reduces of one device, run back to back in a queue: the operation that started such
    # a run decides when the last in the run ends.
    maker = list(range(len(arrival)))  # operation -> operation that started the run which its message ends
    last_in_queue: dict[int, int] = {}  # queue -> operation whose message, or all-reduce, was the last in it
    for first, stop in timeline.spans:
        for number in range(first, stop):
            _, after, link, lead = work.steps[number]
            bound = start[number] - (work.receive[number] if work.receive else 0.0) - close
            stays = number not in first_of_device and _free(timeline, number - 1) >= bound
            candidates = [number - 1] if stays else []
            candidates += [maker[needed] for needed in work.waits[number] if arrival[needed] >= bound]
            best = max(candidates, key=backwards.__getitem__, default=-1)  # the first among equals
            before[number] = best
            backwards[number] = (backwards[best] if best >= 0 else 0) + (timeline.operations[number].kind in BACKWARDS)
            if after and (link < 0 or timeline.costs.overlap):
                queue = link if link >= 0 else -1 - timeline.device_of(timeline.operations[number])
                if arrival[number] - after > timeline.end[number] - lead + close:
                    maker[number] = maker[last_in_queue[queue]]
                last_in_queue[queue] = number
            for message in work.inputs.get(number, ()):
                maker[message.number] = number
                if timeline.costs.overlap:
                    if arrival[message.number] - message.time > timeline.end[number] - message.lead + close:
                        maker[message.number] = maker[last_in_queue[message.link]]
                    last_in_queue[message.link] = message.number
    last = max(
        (n for n in range(len(start)) if max(timeline.end[n], _sync_end(timeline, n)) >= timeline.makespan - close),
        key=lambda number: (backwards[number], number),
    )
    if timeline.end[last] < timeline.makespan - close:  # its all-reduce ends last, behind others of its device
        last = maker[last]
    path = []
    while last >= 0:
        path.append(last)
        last = before[last]
    return path[::-1]


def _free(timeline: Timeline, number: int) -> float:
    """The time at which the device of the operation is free for the next operation."""
    _, after, link, _ = timeline.work.steps[number]
    if timeline.costs.overlap:
        return timeline.end[number]
    inputs = sum(message.time for message in timeline.work.inputs.get(number, ()))
    return timeline.end[number] + (after if link >= 0 else 0.0) + inputs


def _sync_end(timeline: Timeline, number: int) -> float:
    return timeline.arrival[number] if timeline.operations[number].kind is Kind.SYNC else 0.0
