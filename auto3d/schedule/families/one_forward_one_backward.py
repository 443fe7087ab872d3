"""1F1B: a warm-up, then one forward and one backward in turn (DAPPLE, PipeDream-Flush; Chimera, section 2)."""

from auto3d.schedule.family import Family
from auto3d.schedule.operation import Schedule
from auto3d.schedule.options import recomputing
from auto3d.schedule.straight_pipeline import alternating_orders, straight_pipeline
from auto3d.schedule.sync import place_syncs


def one_forward_one_backward(
    *, devices: int, micro_batches: int, recompute: str = "none", sync: str = "lazy"
) -> Schedule:
    """1F1B. It idles as long as GPipe, (D - 1)(F + B), but stage s holds the activations of at most D - s
    micro-batches.

    Recomputation is inside B and so waits for the gradient: a device idles (D - 1)(F + R + B) (Merak 2022, figure 4a).
    """
    orders = alternating_orders(devices, micro_batches)
    recomputed = recomputing("1f1b", devices, recompute)
    return place_syncs(straight_pipeline("1f1b", orders, micro_batches=micro_batches, recompute=recomputed), sync)


FAMILY = Family(
    name="1f1b",
    summary="a warm-up, then one forward and one backward in turn",
    source="PipeDream-Flush: Narayanan et al., ICML 2021, section 3.2; DAPPLE: Fan et al., PPoPP 2021, section 3",
    ships_in=("Megatron-LM", "DeepSpeed", "torch.distributed.pipelining", "ColossalAI", "Primus"),
    build=one_forward_one_backward,
)
