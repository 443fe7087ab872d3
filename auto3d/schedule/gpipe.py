"""GPipe: all forwards, then all backwards (Huang et al. 2019; Chimera, table 2)."""

from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Operation, Schedule


def gpipe(*, devices: int, micro_batches: int) -> Schedule:
    """Every device holds the activations of all ``micro_batches`` at once; idle (D - 1)(F + B) per device."""

    def device(stage: int) -> tuple[Operation, ...]:
        forwards = [Operation(Kind.FORWARD, stage, (m,)) for m in range(micro_batches)]
        backwards = [Operation(Kind.BACKWARD, stage, (m,)) for m in range(micro_batches)]
        return (*forwards, *backwards, Operation(Kind.SYNC, stage), Operation(Kind.UPDATE, stage))

    return Schedule(
        name="gpipe",
        stages=devices,
        micro_batches=micro_batches,
        device_of={(stage, 0): stage for stage in range(devices)},
        operations=tuple(device(stage) for stage in range(devices)),
    )


FAMILY = Family(
    name="gpipe",
    summary="all forwards, then all backwards (Huang et al. 2019)",
    build=gpipe,
)
