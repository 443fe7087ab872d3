"""What the V-shaped schedules share: one pipe down through the devices and up again, with two stages on each device."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from auto3d.schedule.operation import Kind, Operation, Schedule, singles
from auto3d.schedule.weight_filling import fill_with_weights

Step = tuple[Kind, int]  # kind and stage of an operation
Slots = tuple[int, int, int, int]  # slots of one micro-batch on one device: F down, F up, I up, I down
PERIOD = 6  # slots from one building block to the next: F, I and W on both stages


def numbered_in_order(steps: Iterable[Step], micro_batches: int) -> tuple[Operation, ...]:
    """``steps`` as operations: the n-th forward, backward and weight half of a stage are for micro-batch n.

    Whole backwards and input halves are numbered together. Operations from micro-batch ``micro_batches`` on are left
    out.
    """
    counts: Counter[Step] = Counter()
    operations = []
    for kind, stage in steps:
        numbering = Kind.BACKWARD_INPUT if kind is Kind.BACKWARD else kind
        micro_batch = counts[numbering, stage]
        counts[numbering, stage] += 1
        if kind is Kind.BACKWARD:
            counts[Kind.BACKWARD_WEIGHT, stage] += 1
        if micro_batch < micro_batches:
            operations.append(singles(kind, stage, micro_batches)[micro_batch])
    return tuple(operations)


def v_pipeline(name: str, orders: Sequence[Sequence[Operation]], micro_batches: int) -> Schedule:
    """The schedule ``name`` in which device s runs ``orders[s]``: the stages s (down the V) and 2D - 1 - s (up)."""
    devices = len(orders)
    return Schedule(
        name=name,
        stages=2 * devices,
        micro_batches=micro_batches,
        device_of={(stage, 0): min(stage, 2 * devices - 1 - stage) for stage in range(2 * devices)},
        operations=tuple(map(tuple, orders)),
    )


def repeated_blocks(
    name: str, *, devices: int, micro_batches: int, block: Callable[[int], Slots], limit: int
) -> Schedule:
    """The schedule ``name`` in which every micro-batch repeats one building block (Qi et al., NeurIPS 2024, section 2).

    ``block(s)`` has the slots of micro-batch 0 on device s; the slots of micro-batch m come 6m later. Weight halves
    take the free slots until the last micro-batch starts on a device; after that, they fill the waits. Each device
    keeps within ``limit`` micro-batches of one stage. Devices then run in this order, as early as they can: the paper
    calls that squeezing.
    """
    orders, slots = [], []
    for home in range(devices):
        down, up = home, 2 * devices - 1 - home
        of_block = ((Kind.FORWARD, down), (Kind.FORWARD, up), (Kind.BACKWARD_INPUT, up), (Kind.BACKWARD_INPUT, down))
        starts = [
            (slot + PERIOD * micro_batch, step)
            for step, slot in zip(of_block, block(home), strict=True)
            for micro_batch in range(micro_batches)
        ]
        starts.sort(key=lambda start: start[0])
        last = block(home)[0] + PERIOD * (micro_batches - 1)
        orders.append(numbered_in_order([step for _, step in starts], micro_batches))
        slots.append([slot if slot <= last else 0 for slot, _ in starts])
    return v_pipeline(name, fill_with_weights(orders, 2 * devices, limit, slots), micro_batches)
