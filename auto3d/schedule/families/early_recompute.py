"""Early recomputation: 1F1B whose recomputation does not wait for the gradient (Merak 2022, section 6.1, figure 4b)."""

from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.straight_pipeline import alternating_orders, straight_pipeline
from auto3d.schedule.sync import place_syncs


def early_recompute(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """R stands before each B in 1F1B's order, and fills the wait for the gradient; idle (D - 1)(F + B) per device.

    The last stage recomputes too, though its activations are just made: leaving that out is the next schedule's step.
    """
    orders = alternating_orders(devices, micro_batches, backward=(Kind.RECOMPUTE, Kind.BACKWARD))
    schedule = straight_pipeline("early-recompute", orders, micro_batches=micro_batches, recompute=range(devices))
    return place_syncs(schedule, sync)


FAMILY = Family(
    name="early-recompute",
    summary="1F1B whose recomputation does not wait for the gradient (Merak 2022, figure 4b)",
    build=early_recompute,
)
