"""ZB-H2: the backward split in two, and twice the forwards ahead of 1F1B (Qi et al., ICLR 2024, section 2)."""

from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.straight_pipeline import alternating_orders, straight_pipeline
from auto3d.schedule.sync import place_syncs
from auto3d.schedule.weight_filling import fill_with_weights


def zb_h2(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """ZB-H2: twice as many forwards ahead as 1F1B, with up to 2D - 1 micro-batches held on every device.

    If N >= 2D - 1, a device idles (D - 1)(F + I - 2W) between its first and its last operation: nothing if F = I = W.
    Compared with the makespan it idles as long as ZB-H1. The paper saves that time too, with an update that does not
    wait for all devices.
    """
    orders = alternating_orders(devices, micro_batches, backward=(Kind.BACKWARD_INPUT,), ahead_per_hop=2)
    orders = fill_with_weights(orders, devices, limit=2 * devices - 1)
    return place_syncs(straight_pipeline("zb-h2", orders, micro_batches=micro_batches), sync)


FAMILY = Family(
    name="zb-h2",
    summary="the backward split in two, and twice the activations for almost no bubbles",
    source="Qi et al., ICLR 2024, section 2",
    build=zb_h2,
)
