"""Two halves of a micro-batch that take turns: the collectives of one half run under the compute of the other half.

Merak's sub-pipelined tensor parallelism (Lai et al. 2023, section 5.3).
"""

from collections.abc import Iterable

Segment = tuple[float, float]  # seconds of compute, then seconds of a collective that the next segment waits for


def sub_pipelined_s(segments: Iterable[Segment]) -> float:
    """Seconds in which two halves each go through ``segments``, the times of one half.

    The device runs one compute segment at a time, and the group one collective at a time. The halves take turns on
    both: the first half's segment, the second half's, the first half's next segment.
    """
    compute_free = group_free = 0.0
    ready = [0.0, 0.0]  # when each half can go on
    for compute, collective in segments:
        for half in (0, 1):
            compute_free = ready[half] = max(compute_free, ready[half]) + compute
            if collective:
                group_free = ready[half] = max(group_free, ready[half]) + collective
    return max(ready)
