"""Interleaved 1F1B: several stages (chunks) per device (Megatron-LM, Narayanan et al., SC 2021, section 2.2)."""

from itertools import product

from auto3d.schedule.alternation import alternate
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.options import check_least, recomputing
from auto3d.schedule.sync import place_syncs


def interleaved(
    *, devices: int, micro_batches: int, chunks: int = 2, recompute: str = "none", sync: str = "lazy"
) -> Schedule:
    """Interleaved 1F1B: stage s is on device s mod D, with v = ``chunks`` stages per device.

    Each device idles (D - 1)(F + B)/v if D divides ``micro_batches``. Micro-batches go in groups of D; a device runs
    one group on each of its stages in turn. The paper requires a multiple of D micro-batches. For other numbers, the
    order is that of the next multiple, with the surplus micro-batches left out. An order that can run still can after
    that.
    """
    check_least("interleaved-1f1b", "chunks", chunks, 2)
    groups = -(-micro_batches // devices)

    def device(home: int) -> tuple[Operation, ...]:
        stages = range(home, devices * chunks, devices)
        forwards, backwards = [], []
        for group, chunk, member in product(range(groups), range(chunks), range(devices)):
            micro_batch = group * devices + member
            forwards.append(Operation(Kind.FORWARD, stages[chunk], (micro_batch,)))
            backwards.append((Operation(Kind.BACKWARD, stages[-1 - chunk], (micro_batch,)),))
        ahead = (chunks - 1) * devices + 2 * (devices - 1 - home)
        order = alternate(forwards, backwards, ahead)
        return tuple(operation for operation in order if operation.micro_batches[0] < micro_batches)

    schedule = Schedule(
        name="interleaved-1f1b",
        stages=devices * chunks,
        micro_batches=micro_batches,
        device_of={(stage, 0): stage % devices for stage in range(devices * chunks)},
        operations=tuple(device(home) for home in range(devices)),
        recompute=recomputing("interleaved-1f1b", devices * chunks, recompute),
    )
    return place_syncs(schedule, sync)


FAMILY = Family(
    name="interleaved-1f1b",
    summary="1F1B with several chunks of the model per device (Megatron-LM, Narayanan et al. 2021)",
    build=interleaved,
)
