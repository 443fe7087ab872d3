"""ZB-V: two stages per device, placed in a V, with the backward split in two (Qi et al., ICLR 2024, section 6)."""

from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.sync import place_syncs
from auto3d.schedule.v_pipeline import numbered_in_order, v_pipeline
from auto3d.schedule.weight_filling import fill_with_weights

F, I = Kind.FORWARD, Kind.BACKWARD_INPUT  # noqa: E741


def zb_v(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """ZB-V: device s holds the stages s (on the way down the V) and 2D - 1 - s (on the way up).

    If F = I = W there are no bubbles, at the activations of D micro-batches. The paper searches for the order, given
    the times of operations. For equal times the order has a closed form: 2(D - s) - 1 forwards down; then the first
    micro-batches up and back; then F I down and F I up in turn; then the remaining operations. Weight halves fill the
    waits. The pattern needs 2D - 1 micro-batches; with fewer, the order of 2D - 1 applies, without the surplus.

    From N = 2D - 1 on, a device never waits between its operations. From N = D on, it idles (D - 1)/2 F compared with
    the makespan.
    """
    unfolded = max(micro_batches, 2 * devices - 1)

    def device(home: int) -> tuple[Operation, ...]:
        down, up = home, 2 * devices - 1 - home
        to_turn = devices - home  # number of devices from this device to the turn of the V
        repeats = unfolded - devices  # repetitions on both stages; the last repetitions have no forward down
        drained = to_turn - 1
        pattern = (
            [(F, down)] * (2 * to_turn - 1)
            + [(F, up), (F, down)] * home
            + [(F, up), (I, up)] * to_turn
            + [(F, down), (I, down), (F, up), (I, up)] * (repeats - drained)
            + [(I, down), (F, up), (I, up)] * drained
            + [(I, down), (I, up)] * home
            + [(I, down)] * to_turn
        )
        return numbered_in_order(pattern, micro_batches)

    orders = fill_with_weights([device(home) for home in range(devices)], 2 * devices, limit=2 * devices)
    return place_syncs(v_pipeline("zb-v", orders, micro_batches), sync)


FAMILY = Family(
    name="zb-v",
    summary="two chunks per device in a V, backward split, no bubbles at 1F1B's activations",
    source="Qi et al., ICLR 2024, section 6",
    ships_in=("torch.distributed.pipelining", "zero-bubble-pipeline-parallelism", "ColossalAI", "Primus"),
    build=zb_v,
)
