"""V-Half: two stages per device in a V, at half of 1F1B's activations (Qi et al., NeurIPS 2024).

"Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), section 3; slots of the building block as in
sail-sg/zero-bubble-pipeline-parallelism, zbv_greedy.py. The authors' table of bubbles and activations:
huggingface.co/spaces/sail/pipeline-parallelism-with-controllable-memory.
"""

from auto3d.schedule.family import Family
from auto3d.schedule.operation import Schedule
from auto3d.schedule.sync import place_syncs
from auto3d.schedule.v_pipeline import Slots, repeated_blocks


def v_half(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """V-Half: device s holds the stages s (on the way down the V) and 2D - 1 - s (on the way up).

    On every device up to floor((D + 2)/2) micro-batches are in flight, as in the authors' table. If F = I = W, D > 1
    and N >= D, each device idles (3(D - 1) + floor(D/4))/2 forwards, half a forward less if D is odd; the table has
    about 3D/2, the bubble rate D/(2N). While 2I <= W + 2F and 2F <= W + 2I, no device waits in a repetition.
    """
    gap = 3 if devices % 2 == 0 else 0  # without it, two operations would share a slot

    def block(home: int) -> Slots:
        return 2 * home, 3 * devices - 2 - home, 3 * devices - 1 + gap + 2 * home, 6 * devices - 2 + gap - home

    schedule = repeated_blocks(
        "v-half", devices=devices, micro_batches=micro_batches, block=block, limit=2 * ((devices + 2) // 2)
    )
    return place_syncs(schedule, sync)


FAMILY = Family(
    name="v-half",
    summary="two chunks per device in a V, backward split, half of 1F1B's activations",
    source="Qi et al., NeurIPS 2024",
    ships_in=("zero-bubble-pipeline-parallelism",),
    build=v_half,
)
