"""Interleaved 1F1B with the backward split in two (Qi et al., ICLR 2024; torch's ScheduleInterleavedZeroBubble)."""

from auto3d.schedule.alternation import alternate
from auto3d.schedule.family import Family
from auto3d.schedule.interleaving import check_group, looped, passes, without_surplus
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.options import check_least
from auto3d.schedule.sync import place_syncs

F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741


def interleaved_zero_bubble(
    *, devices: int, micro_batches: int, chunks: int = 2, group: int = 0, sync: str = "lazy"
) -> Schedule:
    """Interleaved 1F1B with split backwards and half as many forwards ahead; ``chunks`` and ``group`` as there.

    Device d runs one forward ahead for each hop to the last device, and the weight half of a micro-batch d backwards
    after its input half, as ZB-H1 does. If no group is smaller than D, each device idles (D - 1)(F + I - W)/v. If D
    divides N and groups are of D, it holds at most D micro-batches. Devices receive up to one group ahead.
    """
    check_least("interleaved-zero-bubble", "chunks", chunks, 2)
    group = check_group("interleaved-zero-bubble", devices, micro_batches, group)

    def device(home: int) -> tuple[Operation, ...]:
        forwards, inputs, weights = (passes(kind, home, devices, micro_batches, chunks, group) for kind in (F, I, W))
        late = min(home, len(inputs))  # input halves after which no weight half comes yet
        halves = [(half,) for half in inputs[:late]] + list(zip(inputs[late:], weights, strict=False))
        order = alternate(forwards, halves, ahead=(chunks - 1) * group + devices - 1 - home)
        return without_surplus((*order, *weights[len(weights) - late :]), micro_batches, devices * chunks)

    schedule = looped(
        "interleaved-zero-bubble",
        [device(home) for home in range(devices)],
        stages=devices * chunks,
        micro_batches=micro_batches,
        held_ahead=group,
    )
    return place_syncs(schedule, sync)


FAMILY = Family(
    name="interleaved-zero-bubble",
    summary="interleaved 1F1B with the backward split in two, fewer bubbles at the activations of 1F1B",
    source="torch's ScheduleInterleavedZeroBubble, after Qi et al., ICLR 2024, section 2",
    ships_in=("torch.distributed.pipelining",),
    build=interleaved_zero_bubble,
)
