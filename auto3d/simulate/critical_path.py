"""The operations that decide how long an iteration takes (Chimera, section 3.4)."""

from auto3d.schedule.operation import BACKWARDS, Kind, Operation
from auto3d.simulate.simulate import Timeline

_CLOSE = 1e-9  # of the makespan: times that differ by less are the same, added up in another order


def critical_path(timeline: Timeline) -> list[Operation]:
    """Operations without slack between them, from the first start to the makespan: each starts when the one before it,
    its message or its all-reduce, is over. Of several such paths, the one with the most backwards, so that C_f and C_b
    are those of the paper; of those, one that stays on a device where it can, as in Merak's figure 4."""
    numbers = critical_numbers(timeline)
    return [timeline.operations[number] for number in numbers]


def count(path: list[Operation]) -> tuple[int, int]:
    """(C_f, C_b): forwards and backwards; a backward in two halves counts where its input half is on the path."""
    forwards = sum(operation.kind is Kind.FORWARD for operation in path)
    return forwards, sum(operation.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) for operation in path)


def critical_numbers(timeline: Timeline) -> list[int]:
    """``critical_path`` by number."""
    if not timeline.operations:
        return []
    work, start, arrival = timeline.work, timeline.start, timeline.arrival
    close = _CLOSE * timeline.makespan
    first_of_device = set(work.bounds)
    weight = [0] * len(start)  # backwards on the best path that ends with this operation
    before = [-1] * len(start)  # the operation before it on that path
    maker = list(range(len(start)))  # of the first in the queue that this operation's message, or all-reduce, ends
    head: dict[int, int] = {}  # of each queue: the operation whose message, or all-reduce, was the last in it
    for first, stop in timeline.spans:
        for number in range(first, stop):
            _, after, link = work.steps[number]
            bound = start[number] - (work.receive[number] if work.receive else 0.0) - close
            stays = number not in first_of_device and _free(timeline, number - 1) >= bound
            candidates = [number - 1] if stays else []
            candidates += [maker[needed] for needed in work.waits[number] if arrival[needed] >= bound]
            best = max(candidates, key=weight.__getitem__, default=-1)  # of equals, the first
            before[number] = best
            weight[number] = (weight[best] if best >= 0 else 0) + (timeline.operations[number].kind in BACKWARDS)
            if after and (link < 0 or timeline.costs.overlap):
                queue = link if link >= 0 else -1 - timeline.device_of(timeline.operations[number])
                if arrival[number] - after > timeline.end[number] + close:
                    maker[number] = maker[head[queue]]
                head[queue] = number
    last = max(
        (n for n in range(len(start)) if max(timeline.end[n], _sync_end(timeline, n)) >= timeline.makespan - close),
        key=lambda number: (weight[number], number),
    )
    path = []
    while last >= 0:
        path.append(last)
        last = before[last]
    return path[::-1]


def _free(timeline: Timeline, number: int) -> float:
    """When the operation's device turns to the next one."""
    _, after, link = timeline.work.steps[number]
    return timeline.end[number] + (after if link >= 0 and not timeline.costs.overlap else 0.0)


def _sync_end(timeline: Timeline, number: int) -> float:
    return timeline.arrival[number] if timeline.operations[number].kind is Kind.SYNC else 0.0
