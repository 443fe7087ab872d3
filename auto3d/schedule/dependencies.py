"""What each operation of a schedule must wait for, beyond those before it on its own device.

Operations are numbered device by device, in order: the checker, the simulator and the placement of gradient syncs walk
these numbers, not the operations.
"""

from collections import defaultdict
from itertools import accumulate, chain

from auto3d.schedule.operation import Kind, Operation, Schedule


def numbered(schedule: Schedule) -> list[Operation]:
    """All operations; an operation's index in this list is its number."""
    return list(chain.from_iterable(schedule.operations))


def bounds(schedule: Schedule) -> list[int]:
    """D + 1 numbers: the operations of device d have the numbers from ``bounds[d]`` to ``bounds[d + 1] - 1``."""
    return list(accumulate(map(len, schedule.operations), initial=0))


def dependencies(schedule: Schedule) -> list[tuple[int, ...]]:
    """For each operation, by number, the operations whose results it uses.

    A forward uses the forward of the stage before, a backward (or its input half) its own forward and the gradient of
    the stage after, a recomputation its forward, a weight half its input half. What no operation makes is left out, and
    what two make is taken from the later one: the checker counts them. Syncs and updates follow from the order of their
    device alone.
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
    for operation in operations:
        kind, stage, micro_batches = operation.kind, operation.stage, operation.micro_batches
        if kind is f:
            found = (*map(forward[stage - 1].get, micro_batches),)
        elif kind is b or kind is i:
            found = (*map(forward[stage].get, micro_batches), *map(gradient[stage + 1].get, micro_batches))
        elif kind is r:
            found = (*map(forward[stage].get, micro_batches),)
        elif kind is w:
            found = (*map(gradient[stage].get, micro_batches),)
        else:
            found = ()
        needs.append(tuple(number for number in found if number is not None) if None in found else found)
    return needs
