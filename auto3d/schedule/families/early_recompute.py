"""Early recomputation: 1F1B that recomputes before the gradient arrives (Merak 2022, section 6.1, figure 4b)."""

from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.straight_pipeline import alternating_orders, straight_pipeline
from auto3d.schedule.sync import place_syncs


def early_recompute(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """1F1B with an R before each B, which fills the wait for the gradient. Each device idles (D - 1)(F + B).

    The last stage recomputes too, although its activations are still there; shifted-critical-path leaves that out.
    """
    orders = alternating_orders(devices, micro_batches, backward=(Kind.RECOMPUTE, Kind.BACKWARD))
    schedule = straight_pipeline("early-recompute", orders, micro_batches=micro_batches, recompute=range(devices))
    return place_syncs(schedule, sync)


FAMILY = Family(
    name="early-recompute",
    summary="1F1B whose recomputation does not wait for the gradient",
    source="Lai et al. (Merak), TPDS 2023, section 5.1, figure 3b",
    ships_in=("Merak",),
    build=early_recompute,
)
