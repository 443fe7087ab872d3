"""GEMS: two pipes in opposite directions, one micro-batch at a time (Jain et al. 2020; Chimera, section 2)."""

from auto3d.errors import InputError
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.options import recomputing
from auto3d.schedule.sync import place_syncs


def gems(*, devices: int, micro_batches: int, recompute: str = "none", sync: str = "lazy") -> Schedule:
    """GEMS. Micro-batches take the two pipes in turn; each forward follows the previous micro-batch's backward.

    Two micro-batches are in flight, but no device holds the activations of both. Each device idles
    (N + 1)(D - 1)F if B = F and (2N + 1)(D - 1)F if B = 2F, for every N. (Chimera's table 2 gives the limit.)
    """
    if devices < 2:
        raise InputError("schedule gems: 1 device; its two pipes in opposite directions need 2 devices or more")

    def device(home: int) -> tuple[Operation, ...]:
        operations: list[Operation] = []
        for m in range(micro_batches):
            pipe = m % 2
            stage = devices - 1 - home if pipe else home
            operations += [Operation(kind, stage, (m,), pipe) for kind in (Kind.FORWARD, Kind.BACKWARD)]
        return tuple(operations)

    down = {(stage, 0): stage for stage in range(devices)}
    up = {(stage, 1): devices - 1 - stage for stage in range(devices)}
    schedule = Schedule(
        name="gems",
        stages=devices,
        micro_batches=micro_batches,
        device_of=down | up,
        operations=tuple(device(home) for home in range(devices)),
        recompute=recomputing("gems", devices, recompute),
    )
    return place_syncs(schedule, sync)


FAMILY = Family(
    name="gems",
    summary="two opposite pipes, one micro-batch after the other",
    source="Jain et al., SC 2020; Chimera, section 2",
    build=gems,
)
