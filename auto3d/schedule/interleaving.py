"""What interleaved schedules share: the order in which a device runs its chunks."""

from collections.abc import Sequence

from auto3d.errors import InputError
from auto3d.schedule.operation import Kind, Operation, Schedule, singles


def check_group(family: str, devices: int, micro_batches: int, group: int) -> int:
    """The micro-batches that a device runs on one chunk before the next: ``group``, or D if that is 0; at most N.

    Raises InputError unless D <= ``group`` <= N, as Megatron-LM's ``microbatch_group_size_per_vp_stage``. With fewer,
    the first device would wait for the last device in every group.
    """
    least = min(devices, micro_batches)
    if group and not least <= group <= micro_batches:
        sizes = f"from {least} to {micro_batches}" if least < micro_batches else f"{least}"
        raise InputError(
            f"schedule {family}: group is {group}; {micro_batches} micro-batches on {devices} devices take {sizes}, "
            f"or 0 for {least}"
        )
    return group or least


def passes(kind: Kind, home: int, devices: int, micro_batches: int, chunks: int, group: int) -> list[Operation]:
    """The forwards or, from the last chunk to the first, the backwards of device ``home``, in order.

    Each group of micro-batches passes all chunks before the next group. The last group holds what remains, but at least
    D micro-batches, since fewer would not fill the pipeline. The surplus micro-batches have numbers from N on;
    ``without_surplus`` leaves them out.
    """
    stages = range(home, devices * chunks, devices)
    ordered: list[Operation] = []
    for first in range(0, micro_batches, group):
        size = min(group, max(devices, micro_batches - first))
        for stage in stages if kind is Kind.FORWARD else reversed(stages):
            ordered += singles(kind, stage, first + size)[first : first + size]
    return ordered


def without_surplus(order: Sequence[Operation], micro_batches: int, stages: int) -> tuple[Operation, ...]:
    """``order`` with the micro-batches below N and the stages below ``stages`` only.

    An order that can run still can after that: an operation on the last stage that is kept waits for less than before.
    """
    return tuple(o for o in order if o.micro_batches[0] < micro_batches and o.stage < stages)


def looped(
    name: str,
    orders: Sequence[Sequence[Operation]],
    *,
    stages: int,
    micro_batches: int,
    recompute: frozenset[int] = frozenset(),
    held_ahead: int = 1,
) -> Schedule:
    """The schedule ``name`` with stage s on device s mod D, where device d runs ``orders[d]``."""
    devices = len(orders)
    return Schedule(
        name=name,
        stages=stages,
        micro_batches=micro_batches,
        device_of={(stage, 0): stage % devices for stage in range(stages)},
        operations=tuple(tuple(order) for order in orders),
        recompute=recompute,
        held_ahead=held_ahead,
    )
