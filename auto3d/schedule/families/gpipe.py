"""GPipe: all forwards, then all backwards (Huang et al. 2019; Chimera, table 2)."""

from auto3d.schedule.alternation import of_stage
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.options import recomputing
from auto3d.schedule.straight_pipeline import straight_pipeline
from auto3d.schedule.sync import place_syncs


def gpipe(*, devices: int, micro_batches: int, recompute: str = "none", sync: str = "lazy") -> Schedule:
    """GPipe. Each device holds the activations of all micro-batches at once and idles (D - 1)(F + B)."""
    orders = [
        (*of_stage(Kind.FORWARD, stage, micro_batches), *of_stage(Kind.BACKWARD, stage, micro_batches))
        for stage in range(devices)
    ]
    recomputed = recomputing("gpipe", devices, recompute)
    return place_syncs(straight_pipeline("gpipe", orders, micro_batches=micro_batches, recompute=recomputed), sync)


FAMILY = Family(
    name="gpipe",
    summary="all forwards, then all backwards",
    source="Huang et al., NeurIPS 2019, section 2",
    ships_in=("torch.distributed.pipelining",),
    build=gpipe,
)
