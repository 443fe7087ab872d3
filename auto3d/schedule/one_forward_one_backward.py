"""1F1B: after a warm-up, one forward and one backward in turn (DAPPLE, PipeDream-Flush; Chimera, section 2)."""

from auto3d.schedule.alternation import alternate, of_stage
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.options import recomputing
from auto3d.schedule.sync import place_syncs


def one_forward_one_backward(
    *, devices: int, micro_batches: int, recompute: str = "none", sync: str = "lazy"
) -> Schedule:
    """As many bubbles as GPipe, (D - 1)(F + B), but stage s holds the activations of at most D - s micro-batches.

    Recomputation waits for the gradient, inside B: idle (D - 1)(F + R + B) (Merak, figure 4a).
    """

    def device(stage: int) -> tuple[Operation, ...]:
        forwards = of_stage(Kind.FORWARD, stage, micro_batches)
        backwards = [(backward,) for backward in of_stage(Kind.BACKWARD, stage, micro_batches)]
        return alternate(forwards, backwards, ahead=devices - 1 - stage)

    schedule = Schedule(
        name="1f1b",
        stages=devices,
        micro_batches=micro_batches,
        device_of={(stage, 0): stage for stage in range(devices)},
        operations=tuple(device(stage) for stage in range(devices)),
        recompute=recomputing("1f1b", devices, recompute),
    )
    return place_syncs(schedule, sync)


FAMILY = Family(
    name="1f1b",
    summary="a warm-up, then one forward and one backward in turn (DAPPLE, PipeDream-Flush)",
    build=one_forward_one_backward,
)
