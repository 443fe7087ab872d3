"""An order of operations that a search found for given times and memory: the Plan has it as text, complete."""

from auto3d.errors import InputError
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Schedule
from auto3d.schedule.order_text import NAME, read_order


def synthesized(
    *, devices: int, micro_batches: int, order: str = "", recompute: str = "none", sync: str = "lazy"
) -> Schedule:
    """The schedule whose operations ``order`` lists; see ``auto3d.schedule.order_text``. Its bubble is any."""
    if not order:
        raise InputError(
            f"schedule {NAME}: it has no order; `auto3d plan` and `auto3d schedule synthesize` make one, and "
            f"{NAME}:file=FILE reads one"
        )
    return read_order(order, devices=devices, micro_batches=micro_batches, recompute=recompute, sync=sync)


FAMILY = Family(
    name=NAME,
    summary="an order found by search for the times and the memory of one plan, not by hand",
    source="auto3d's search, 2026",
    build=synthesized,
    periodic=False,
)
