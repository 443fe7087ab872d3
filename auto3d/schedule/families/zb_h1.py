"""ZB-H1: 1F1B with the backward split in two, weight gradients in the bubbles (Qi et al., ICLR 2024, section 2)."""

from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.straight_pipeline import alternating_orders, straight_pipeline
from auto3d.schedule.sync import place_syncs
from auto3d.schedule.weight_filling import fill_with_weights


def zb_h1(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """ZB-H1: the order of 1F1B, with up to D micro-batches held on every device, as on the first device of 1F1B.

    Each device idles (D - 1)(F + I - W) if N >= D.
    """
    orders = alternating_orders(devices, micro_batches, backward=(Kind.BACKWARD_INPUT,))
    orders = fill_with_weights(orders, devices, limit=devices)
    return place_syncs(straight_pipeline("zb-h1", orders, micro_batches=micro_batches), sync)


FAMILY = Family(
    name="zb-h1",
    summary="1F1B with the backward split in two, at 1F1B's activations",
    source="Qi et al., ICLR 2024, section 2",
    ships_in=("zero-bubble-pipeline-parallelism", "Primus"),
    build=zb_h1,
)
