"""ZB-H1 and ZB-H2: 1F1B with the backward split, weights' gradients filling the bubbles (Qi et al., ICLR 2024, 2)."""

from auto3d.schedule.alternation import alternate, of_stage
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.sync import place_syncs
from auto3d.schedule.weight_filling import fill_with_weights


def zb_h1(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """1F1B's order and its first device's D activations on every device; idle (D - 1)(F + I - W) where N >= D."""
    ahead = [devices - 1 - stage for stage in range(devices)]
    return place_syncs(_split("zb-h1", devices, micro_batches, ahead, limit=devices), sync)


def zb_h2(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """Twice the forwards ahead, and 2D - 1 micro-batches held on every device.

    From its first to its last operation a device idles (D - 1)(F + I - 2W), nothing where F = I = W, if N >= 2D - 1.
    Against the makespan it idles as ZB-H1: the paper gains there by an update that does not wait for all devices.
    """
    ahead = [2 * (devices - 1 - stage) for stage in range(devices)]
    return place_syncs(_split("zb-h2", devices, micro_batches, ahead, limit=2 * devices - 1), sync)


def _split(name: str, devices: int, micro_batches: int, ahead: list[int], *, limit: int) -> Schedule:
    def device(stage: int) -> tuple[Operation, ...]:
        inputs = [(half,) for half in of_stage(Kind.BACKWARD_INPUT, stage, micro_batches)]
        return alternate(of_stage(Kind.FORWARD, stage, micro_batches), inputs, ahead[stage])

    return Schedule(
        name=name,
        stages=devices,
        micro_batches=micro_batches,
        device_of={(stage, 0): stage for stage in range(devices)},
        operations=fill_with_weights([device(stage) for stage in range(devices)], devices, limit),
    )


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
