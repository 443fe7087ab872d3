"""Interleaved 1F1B: several stages (chunks) per device (Megatron-LM, Narayanan et al., SC 2021, section 2.2)."""

from auto3d.errors import InputError
from auto3d.schedule.alternation import alternate
from auto3d.schedule.family import Family
from auto3d.schedule.interleaving import check_group, looped, passes, without_surplus
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.options import check_least, recomputing
from auto3d.schedule.sync import place_syncs


def interleaved(
    *,
    devices: int,
    micro_batches: int,
    chunks: int = 2,
    group: int = 0,
    fewer: int = 0,
    recompute: str = "none",
    sync: str = "lazy",
) -> Schedule:
    """Interleaved 1F1B: stage s is on device s mod D, with v = ``chunks`` stages per device.

    A device runs ``group`` micro-batches on each of its stages in turn: D of them, or from D to N as Megatron-LM's
    ``microbatch_group_size_per_vp_stage``; 0 stands for D. Each device idles (D - 1)(F + B)/v if no group is smaller
    than D. Larger groups hold more activations, and the first device receives group - D messages of the last device
    ahead: so much time is there to send them.

    Megatron-LM refuses a last group of fewer than D micro-batches. Here such a group has the order of D micro-batches,
    without the surplus.

    The last ``fewer`` devices hold one stage less. Then the order is that without ``fewer``, with those stages left
    out. It takes no longer, for stages that take as long.
    """
    check_least("interleaved-1f1b", "chunks", chunks, 2)
    if not 0 <= fewer < devices:
        raise InputError(f"schedule interleaved-1f1b: fewer is {fewer}; it must be from 0 to {devices - 1}")
    stages = devices * chunks - fewer
    group = check_group("interleaved-1f1b", devices, micro_batches, group)

    def device(home: int) -> tuple[Operation, ...]:
        forwards, backwards = (
            passes(kind, home, devices, micro_batches, chunks, group) for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        ahead = (chunks - 1) * group + 2 * (devices - 1 - home)
        order = alternate(forwards, [(backward,) for backward in backwards], ahead)
        return without_surplus(order, micro_batches, stages)

    schedule = looped(
        "interleaved-1f1b",
        [device(home) for home in range(devices)],
        stages=stages,
        micro_batches=micro_batches,
        recompute=recomputing("interleaved-1f1b", stages, recompute),
        held_ahead=max(1, group - devices + 1),
    )
    return place_syncs(schedule, sync)


FAMILY = Family(
    name="interleaved-1f1b",
    summary="1F1B with several chunks of the model per device",
    source="Narayanan et al., SC 2021, section 2.2",
    ships_in=("Megatron-LM", "torch.distributed.pipelining", "ColossalAI", "Primus"),
    build=interleaved,
)
