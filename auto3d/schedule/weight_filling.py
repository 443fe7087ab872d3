"""Placement of the weight halves of split backwards in the bubbles (Qi et al., ICLR 2024)."""

from collections import deque
from collections.abc import Sequence
from math import inf

from auto3d.schedule.operation import Kind, Operation


def fill_with_weights(
    orders: Sequence[Sequence[Operation]],
    stages: int,
    limit: int,
    slots: Sequence[Sequence[int]] = (),
) -> list[tuple[Operation, ...]]:
    """Each device's F and I in the order of ``orders``, with one W for each I placed between them.

    The walk gives every operation the same duration, one unit of time. A device runs its next F or I if it can. If that
    has to wait, or if one more forward would leave more than ``limit`` forwards without their W, it runs its oldest
    pending W instead. ``stages`` is the number of stages of the pipeline. ``slots`` has, for each operation of
    ``orders``, the time before which the walk does not run it.
    """
    ends: dict[tuple[Kind, int, int], int] = {}  # (F or I, stage, micro-batch) -> time at which it ends
    filled: list[list[Operation]] = [[] for _ in orders]
    position = [0] * len(orders)  # how many F and I each device has run
    held = [0] * len(orders)  # how many forwards of each device are still without their W
    pending: list[deque[Operation]] = [deque() for _ in orders]  # W whose I has run

    def can_run(device: int, now: int) -> bool:
        if position[device] == len(orders[device]):
            return False
        if slots and slots[device][position[device]] > now:
            return False
        operation = orders[device][position[device]]
        (m,) = operation.micro_batches
        if operation.kind is Kind.FORWARD:
            if held[device] >= limit:
                return False
            needed = (Kind.FORWARD, operation.stage - 1, m) if operation.stage > 0 else None
        else:
            needed = (Kind.BACKWARD_INPUT, operation.stage + 1, m) if operation.stage < stages - 1 else None
        return needed is None or ends.get(needed, inf) <= now

    def run_next(device: int, now: int) -> bool:
        if can_run(device, now):
            operation = orders[device][position[device]]
            position[device] += 1
            ends[operation.kind, operation.stage, operation.micro_batches[0]] = now + 1
            if operation.kind is Kind.FORWARD:
                held[device] += 1
            else:
                pending[device].append(Operation(Kind.BACKWARD_WEIGHT, operation.stage, operation.micro_batches))
        elif pending[device]:
            operation = pending[device].popleft()
            held[device] -= 1
        else:
            return False
        filled[device].append(operation)
        return True

    now, last_slot = 0, max((slot for times in slots for slot in times), default=0)
    while sum(run_next(device, now) for device in range(len(orders))) or now < last_slot:
        now += 1
    assert position == [len(order) for order in orders], f"under limit {limit}, the orders stop at {position}"
    return [tuple(operations) for operations in filled]
