"""1F1B: after a warm-up, one forward and one backward in turn (DAPPLE, PipeDream-Flush; Chimera, section 2)."""

from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Operation, Schedule


def one_forward_one_backward(*, devices: int, micro_batches: int) -> Schedule:
    """As many bubbles as GPipe, but stage s holds the activations of at most D - s micro-batches."""

    def device(stage: int) -> tuple[Operation, ...]:
        warm_up = min(devices - stage - 1, micro_batches)
        forwards = [Operation(Kind.FORWARD, stage, (m,)) for m in range(micro_batches)]
        backwards = [Operation(Kind.BACKWARD, stage, (m,)) for m in range(micro_batches)]
        steady = [operation for pair in zip(forwards[warm_up:], backwards, strict=False) for operation in pair]
        drain = backwards[micro_batches - warm_up :]
        return (*forwards[:warm_up], *steady, *drain, Operation(Kind.SYNC, stage), Operation(Kind.UPDATE, stage))

    return Schedule(
        name="1f1b",
        stages=devices,
        micro_batches=micro_batches,
        device_of={(stage, 0): stage for stage in range(devices)},
        operations=tuple(device(stage) for stage in range(devices)),
    )


FAMILY = Family(
    name="1f1b",
    summary="a warm-up, then one forward and one backward in turn (DAPPLE, PipeDream-Flush)",
    build=one_forward_one_backward,
)
