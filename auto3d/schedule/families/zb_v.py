"""ZB-V: two chunks per device, placed in a V, with the backward split (Qi et al., 2024, section 6)."""

from collections import Counter

from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.sync import place_syncs
from auto3d.schedule.weight_filling import fill_with_weights

F, I = Kind.FORWARD, Kind.BACKWARD_INPUT  # noqa: E741


def zb_v(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """Device s holds stages s (the way down) and 2D - 1 - s (the way up); no bubble where F = I = W, at D activations.

    The paper finds the order by a search for given times. For equal times it can be written down: 2(D - s) - 1 forwards
    down; then the first micro-batches up and back; then F I down, F I up in turn; then what is left. W fill the waits.
    It takes 2D - 1 micro-batches to unfold; fewer follow the order of 2D - 1 without the ones that do not exist. No
    bubble is left between a device's operations from N = 2D - 1 on, and (D - 1)/2 F against the makespan from N = D on.
    """
    unfolded = max(micro_batches, 2 * devices - 1)

    def device(home: int) -> tuple[Operation, ...]:
        down, up = home, 2 * devices - 1 - home
        upturned = devices - home  # devices from here to the turn of the V
        repeats = unfolded - devices  # of both chunks, the last of them without a forward down
        drained = upturned - 1
        pattern = (
            [(F, down)] * (2 * upturned - 1)
            + [(F, up), (F, down)] * home
            + [(F, up), (I, up)] * upturned
            + [(F, down), (I, down), (F, up), (I, up)] * (repeats - drained)
            + [(I, down), (F, up), (I, up)] * drained
            + [(I, down), (I, up)] * home
            + [(I, down)] * upturned
        )
        counts: Counter[tuple[Kind, int]] = Counter()
        operations = []
        for kind, stage in pattern:
            micro_batch = counts[kind, stage]
            counts[kind, stage] += 1
            if micro_batch < micro_batches:
                operations.append(Operation(kind, stage, (micro_batch,)))
        return tuple(operations)

    schedule = Schedule(
        name="zb-v",
        stages=2 * devices,
        micro_batches=micro_batches,
        device_of={(stage, 0): min(stage, 2 * devices - 1 - stage) for stage in range(2 * devices)},
        operations=fill_with_weights([device(home) for home in range(devices)], 2 * devices, limit=2 * devices),
    )
    return place_syncs(schedule, sync)


FAMILY = Family(
    name="zb-v",
    summary="two chunks per device in a V, backward split, no bubbles at 1F1B's activations (Qi et al. 2024)",
    build=zb_v,
)
