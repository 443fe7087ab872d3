"""What each operation of a schedule must wait for, beyond those before it on its own device.

Operations are numbered device by device, in order: the checker, the simulator and the placement of gradient syncs walk
these numbers, not the operations.
"""

from auto3d.schedule.operation import Kind, Operation, Schedule


def numbered(schedule: Schedule) -> list[Operation]:
    """All operations; an operation's index in this list is its number."""
    return [operation for operations in schedule.operations for operation in operations]


def dependencies(schedule: Schedule) -> list[tuple[int, ...]]:
    """For each operation, by number, the operations whose results it uses.

    A forward uses the forward of the stage before, a backward (or its input half) its own forward and the gradient of
    the stage after, a recomputation its forward, a weight half its input half. What no operation makes is left out, and
    what two make is taken from the later one: the checker counts them. Syncs and updates follow from the order of their
    device alone.
    """
    operations = numbered(schedule)
    width = schedule.micro_batches * schedule.parts * schedule.iterations
    forward: dict[int, int] = {}  # stage * width + micro-batch -> number
    gradient: dict[int, int] = {}
    for number, operation in enumerate(operations):
        if operation.kind is Kind.FORWARD:
            made = forward
        elif operation.kind is Kind.BACKWARD or operation.kind is Kind.BACKWARD_INPUT:
            made = gradient
        else:
            continue
        base = operation.stage * width
        for micro_batch in operation.micro_batches:
            made[base + micro_batch] = number

    needs: list[tuple[int, ...]] = []
    for operation in operations:
        kind, base = operation.kind, operation.stage * width
        if kind is Kind.FORWARD:
            keys = [(forward, base - width)]
        elif kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
            keys = [(forward, base), (gradient, base + width)]
        elif kind is Kind.RECOMPUTE:
            keys = [(forward, base)]
        elif kind is Kind.BACKWARD_WEIGHT:
            keys = [(gradient, base)]
        else:
            keys = []
        found = [made.get(start + m) for made, start in keys for m in operation.micro_batches]
        needs.append(tuple(number for number in found if number is not None))
    return needs
