"""The operations that each operation of a schedule waits for, besides those before it on its device.

Operations are numbered device by device, in order. The checker, the simulator and the placement of gradient syncs work
on these numbers.
"""

from collections import defaultdict
from itertools import accumulate, chain

from auto3d.schedule.operation import Kind, Operation, Schedule


def numbered(schedule: Schedule) -> list[Operation]:
    """All operations, device by device; the index of an operation in this list is its number."""
    return list(chain.from_iterable(schedule.operations))


def bounds(schedule: Schedule) -> list[int]:
    """D + 1 numbers: the operations of device d have the numbers from ``bounds[d]`` to ``bounds[d + 1] - 1``."""
    return list(accumulate(map(len, schedule.operations), initial=0))


def dependencies(schedule: Schedule) -> list[tuple[int, ...]]:
    """Per operation, by number, the operations whose results it uses.

    A forward uses the forward of the stage before, a backward (or its input half) its own forward and the gradient of
    the stage after, a recomputation its forward, a weight half its input half. A result that no operation makes is left
    out, and a result that two operations make is taken from the later operation; the checker reports both errors. Syncs
    and updates have no entries: they depend only on the order of their device.
    """
    f, r, b, i, w = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    operations = numbered(schedule)
    forward: defaultdict[int, dict[int, int]] = defaultdict(dict)  # stage -> micro-batch -> number
    gradient: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for number, operation in enumerate(operations):
        kind = operation.kind
        if kind is f:
            made = forward[operation.stage]
        elif kind is b or kind is i:
            made = gradient[operation.stage]
        else:
            continue
        for micro_batch in operation.micro_batches:
            made[micro_batch] = number

    needs: list[tuple[int, ...]] = []
    sources: tuple[int | None, ...]
    for operation in operations:
        kind, stage, micro_batches = operation.kind, operation.stage, operation.micro_batches
        if kind is f:
            sources = (*map(forward[stage - 1].get, micro_batches),)
        elif kind is b or kind is i:
            sources = (*map(forward[stage].get, micro_batches), *map(gradient[stage + 1].get, micro_batches))
        elif kind is r:
            sources = (*map(forward[stage].get, micro_batches),)
        elif kind is w:
            sources = (*map(gradient[stage].get, micro_batches),)
        else:
            sources = ()
        if None in sources:
            sources = tuple(number for number in sources if number is not None)
        needs.append(sources)  # type: ignore[arg-type]  # mypy does not see that None is no longer in it
    return needs
