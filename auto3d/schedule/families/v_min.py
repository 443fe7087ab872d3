"""V-Min: two stages per device in a V, at a third of 1F1B's activations (Qi et al., NeurIPS 2024).

"Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), section 3; slots of the building block as in
sail-sg/zero-bubble-pipeline-parallelism, zbv_greedy.py. The authors' table of bubbles and activations:
huggingface.co/spaces/sail/pipeline-parallelism-with-controllable-memory.
"""

from auto3d.schedule.family import Family
from auto3d.schedule.operation import Schedule
from auto3d.schedule.sync import place_syncs
from auto3d.schedule.v_pipeline import Slots, repeated_blocks


def v_min(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """V-Min: device s holds the stages s (on the way down the V) and 2D - 1 - s (on the way up).

    On every device up to floor((D + 4)/3) micro-batches are in flight, as in the authors' table. If F = I = W, D > 1
    and N > 1, each device idles 2D - 3/2 forwards if 3 divides D, and 2D - 5/2 otherwise; the table has about 2D, the
    bubble rate 2D/(3N). If the times differ, the devices wait in every repetition: V-Half does not.
    """
    gap = 2 if devices % 3 == 0 else 0  # without it, two operations would share a slot

    def block(home: int) -> Slots:
        return home, 2 * devices - 1 - home, 2 * devices + gap + home, 4 * devices - 1 + gap - home

    schedule = repeated_blocks(
        "v-min", devices=devices, micro_batches=micro_batches, block=block, limit=2 * ((devices + 4) // 3)
    )
    return place_syncs(schedule, sync)


FAMILY = Family(
    name="v-min",
    summary="two chunks per device in a V, backward split, a third of 1F1B's activations",
    source="Qi et al., NeurIPS 2024",
    ships_in=("zero-bubble-pipeline-parallelism",),
    build=v_min,
)
