"""Hanayo: waves of one copy of the model through the devices, down and up again (Liu et al., SC 2023).

Its order is Chimera's, at twice the depth: the two halves of Chimera's devices trade places, so that each holds one
whole copy. The m-th forward of a scheduling unit on stage s has slot s + 2m; its backward has slot 2S - 1 - s + 2m,
with S stages. Each device runs its operations in the order of their slots, and no two have the same slot.
"""

from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.options import check_least, recomputing
from auto3d.schedule.sync import place_syncs


def hanayo(
    *, devices: int, micro_batches: int, waves: int = 1, recompute: str = "none", sync: str = "lazy"
) -> Schedule:
    """Hanayo with w = ``waves`` waves: S = 2wD stages, which pass the devices down and up in turn.

    Scheduling units of D micro-batches follow each other directly, as in Chimera. Each device idles
    (D - 1)(F + K(B - F))/w if N = KD, and holds at most D micro-batches. Interleaved 1F1B with as many chunks idles
    (D - 1)(F + B)/(2w) at every K, and holds up to (D - 1)/(2w) micro-batches more.
    """
    check_least("hanayo", "waves", waves, 1)
    stages = 2 * waves * devices
    device_of = {(stage, 0): min(stage % (2 * devices), -(stage + 1) % (2 * devices)) for stage in range(stages)}
    slots: list[list[tuple[int, Operation]]] = [[] for _ in range(devices)]
    for (stage, _), device in device_of.items():
        for micro_batch in range(micro_batches):
            unit, member = divmod(micro_batch, devices)
            first = 2 * stages * unit + 2 * member
            slots[device].append((first + stage, Operation(Kind.FORWARD, stage, (micro_batch,))))
            slots[device].append((first + 2 * stages - 1 - stage, Operation(Kind.BACKWARD, stage, (micro_batch,))))
    schedule = Schedule(
        name="hanayo",
        stages=stages,
        micro_batches=micro_batches,
        device_of=device_of,
        operations=tuple(tuple(o for _, o in sorted(pairs, key=lambda pair: pair[0])) for pairs in slots),
        recompute=recomputing("hanayo", stages, recompute),
    )
    return place_syncs(schedule, sync)


FAMILY = Family(
    name="hanayo",
    summary="2 x waves chunks per device, which the model passes down and up in turn; one copy of the weights",
    source="Liu et al., SC 2023",
    build=hanayo,
)
