"""Where the weight halves of a split backward go: into the time that a device would wait (Qi et al., 2024)."""

from collections import deque
from collections.abc import Sequence

from auto3d.schedule.operation import Kind, Operation


def fill_with_weights(
    orders: Sequence[Sequence[Operation]], stages: int, limit: int
) -> tuple[tuple[Operation, ...], ...]:
    """Each device's F and I in the order given, with a W for each I.

    Walks all devices in steps of one operation, as if all took equally long. A device runs its next F or I if that can
    run; if not, or if a forward would make it hold more than ``limit`` forwards without their W, its oldest waiting W.
    """
    done: set[tuple[Kind, int, int]] = set()
    filled: list[list[Operation]] = [[] for _ in orders]
    position, held = [0] * len(orders), [0] * len(orders)
    waiting: list[deque[Operation]] = [deque() for _ in orders]

    def can_run(device: int) -> bool:
        if position[device] == len(orders[device]):
            return False
        operation = orders[device][position[device]]
        (m,) = operation.micro_batches
        if operation.kind is Kind.FORWARD:
            return held[device] < limit and (operation.stage == 0 or (Kind.FORWARD, operation.stage - 1, m) in done)
        return operation.stage == stages - 1 or (Kind.BACKWARD_INPUT, operation.stage + 1, m) in done

    while any(position[device] < len(order) or waiting[device] for device, order in enumerate(orders)):
        ran = []
        for device, order in enumerate(orders):
            if can_run(device):
                operation = order[position[device]]
                position[device] += 1
                if operation.kind is Kind.FORWARD:
                    held[device] += 1
                else:
                    waiting[device].append(Operation(Kind.BACKWARD_WEIGHT, operation.stage, operation.micro_batches))
            elif waiting[device]:
                operation = waiting[device].popleft()
                held[device] -= 1
            else:
                continue
            filled[device].append(operation)
            ran.append((operation.kind, operation.stage, operation.micro_batches[0]))
        assert ran, f"orders that stop at {position} under limit {limit}"
        done.update(ran)
    return tuple(tuple(operations) for operations in filled)
