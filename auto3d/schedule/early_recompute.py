"""Early recomputation: 1F1B whose recomputation does not wait for the gradient (Merak 2022, section 6.1, figure 4b)."""

from auto3d.schedule.alternation import alternate, of_stage
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.sync import place_syncs


def early_recompute(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """R stands before each B in 1F1B's order, and fills the wait for the gradient; idle (D - 1)(F + B) per device.

    The last stage recomputes too, though its activations are just made: leaving that out is the next schedule's step.
    """

    def device(stage: int) -> tuple[Operation, ...]:
        forwards = of_stage(Kind.FORWARD, stage, micro_batches)
        recomputes, backwards = (of_stage(kind, stage, micro_batches) for kind in (Kind.RECOMPUTE, Kind.BACKWARD))
        return alternate(forwards, list(zip(recomputes, backwards, strict=True)), ahead=devices - 1 - stage)

    schedule = Schedule(
        name="early-recompute",
        stages=devices,
        micro_batches=micro_batches,
        device_of={(stage, 0): stage for stage in range(devices)},
        operations=tuple(device(stage) for stage in range(devices)),
        recompute=frozenset(range(devices)),
    )
    return place_syncs(schedule, sync)


FAMILY = Family(
    name="early-recompute",
    summary="1F1B whose recomputation does not wait for the gradient (Merak 2022, figure 4b)",
    build=early_recompute,
)
