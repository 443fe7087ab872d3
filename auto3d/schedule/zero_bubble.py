"""ZB-H1 and ZB-H2: 1F1B with the backward split, weights' gradients filling the bubbles (Qi et al., ICLR 2024, 2)."""

from auto3d.schedule.alternation import alternate, of_stage
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.sync import place_syncs


def zb_h1(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """Stage s puts off its W by s micro-batches, so that every device holds D; idle (D - 1)(F + I - W) per device."""
    return _split(
        "zb-h1",
        devices,
        micro_batches,
        sync,
        ahead=[devices - 1 - stage for stage in range(devices)],
        put_off=list(range(devices)),
    )


def zb_h2(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """Twice the forwards ahead, W put off by 2s: each device holds 2D - 1 micro-batches.

    From its first to its last operation a device idles (D - 1)(F + I - 2W), nothing where F = I = W. Against the
    makespan it idles as ZB-H1: the paper gains there by an update that does not wait for all devices.
    """
    return _split(
        "zb-h2",
        devices,
        micro_batches,
        sync,
        ahead=[2 * (devices - 1 - stage) for stage in range(devices)],
        put_off=[2 * stage for stage in range(devices)],
    )


def _split(
    name: str, devices: int, micro_batches: int, sync: str, *, ahead: list[int], put_off: list[int]
) -> Schedule:
    def device(stage: int) -> tuple[Operation, ...]:
        forwards = of_stage(Kind.FORWARD, stage, micro_batches)
        inputs = of_stage(Kind.BACKWARD_INPUT, stage, micro_batches)
        weights = of_stage(Kind.BACKWARD_WEIGHT, stage, micro_batches)
        late = put_off[stage]
        pairs = [(half, *weights[m - late : m - late + 1]) if m >= late else (half,) for m, half in enumerate(inputs)]
        return (*alternate(forwards, pairs, ahead[stage]), *weights[max(0, micro_batches - late) :])

    schedule = Schedule(
        name=name,
        stages=devices,
        micro_batches=micro_batches,
        device_of={(stage, 0): stage for stage in range(devices)},
        operations=tuple(device(stage) for stage in range(devices)),
    )
    return place_syncs(schedule, sync)


FAMILIES = (
    Family(
        name="zb-h1",
        summary="1F1B with the backward split in two, at 1F1B's activations (Qi et al. 2024)",
        build=zb_h1,
    ),
    Family(
        name="zb-h2",
        summary="the backward split in two, and twice the activations for almost no bubbles (Qi et al. 2024)",
        build=zb_h2,
    ),
)
