"""What most schedules share: one pipe through the devices, with stage s on device s."""

from collections.abc import Collection, Mapping, Sequence

from auto3d.schedule.alternation import alternate, of_stage
from auto3d.schedule.operation import Kind, Operation, Schedule

Order = tuple[Operation, ...]  # the operations of one device, in the order in which it runs them


def straight_pipeline(
    name: str,
    orders: Sequence[Order],
    *,
    micro_batches: int,
    recompute: Collection[int] = (),
    slices: int = 1,
    iterations: int = 1,
    weight_version: Mapping[tuple[int, int], int] | None = None,
) -> Schedule:
    """The schedule ``name`` in which device s runs ``orders[s]``, all on stage s; other fields are as in Schedule."""
    return Schedule(
        name=name,
        stages=len(orders),
        micro_batches=micro_batches,
        device_of={(stage, 0): stage for stage in range(len(orders))},
        operations=tuple(orders),
        recompute=frozenset(recompute),
        parts=slices,
        slices=slices,
        iterations=iterations,
        weight_version=dict(weight_version or {}),
    )


def alternating_orders(
    devices: int, micro_batches: int, *, backward: Sequence[Kind] = (Kind.BACKWARD,), ahead_per_hop: int = 1
) -> list[Order]:
    """Per device, a warm-up of forwards, then one forward and one backward in turn, as in 1F1B and its relatives.

    The device at stage s warms up with ``ahead_per_hop`` forwards for each of the D - 1 - s hops to the last stage.
    ``backward`` has the kinds of operation that make up the backward of one micro-batch, in order.
    """
    orders = []
    for stage in range(devices):
        backwards = list(zip(*(of_stage(kind, stage, micro_batches) for kind in backward), strict=True))
        forwards = of_stage(Kind.FORWARD, stage, micro_batches)
        orders.append(alternate(forwards, backwards, ahead=ahead_per_hop * (devices - 1 - stage)))
    return orders
