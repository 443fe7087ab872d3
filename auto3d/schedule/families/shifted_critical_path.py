"""The shifted critical path, from the last stage to the stage before it (Merak 2022, section 6.1, figure 4c)."""

from auto3d.errors import InputError
from auto3d.schedule.alternation import alternate, of_stage
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.straight_pipeline import Order, alternating_orders, straight_pipeline
from auto3d.schedule.sync import place_syncs


def shifted_critical_path(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """Early recomputation with three changes. Each device idles (D - 2)(F + B) if R = F and B <= 2F.

    1. The last stage does not recompute: the activations of the only micro-batch that it holds are still there.
    2. The stage before it runs its third forward before its first backward, in a bubble, and so holds three
       micro-batches.
    3. The first two backwards of that stage, each after its recomputation, come right after those forwards.
    """
    if devices < 2:
        raise InputError("schedule shifted-critical-path: 1 device; it moves work between 2 devices or more")
    orders = [
        *alternating_orders(devices, micro_batches, backward=(Kind.RECOMPUTE, Kind.BACKWARD))[:-2],
        _last_but_one(devices - 2, micro_batches),
        alternating_orders(devices, micro_batches)[-1],
    ]
    recomputed = range(devices - 1)
    schedule = straight_pipeline("shifted-critical-path", orders, micro_batches=micro_batches, recompute=recomputed)
    return place_syncs(schedule, sync)


def _last_but_one(stage: int, micro_batches: int) -> Order:
    """The order of the last stage but one: one more forward ahead than in 1F1B, then two backwards in a row.

    It begins F0 F1 F2, R0 B0, R1 B1, F3.
    """
    recomputes, backwards = (of_stage(kind, stage, micro_batches) for kind in (Kind.RECOMPUTE, Kind.BACKWARD))
    pairs: list[Order] = list(zip(recomputes, backwards, strict=True))
    if micro_batches > 1:
        pairs = [(*pairs[0], *pairs[1]), *pairs[2:]]
    return alternate(of_stage(Kind.FORWARD, stage, micro_batches), pairs, ahead=2)


FAMILY = Family(
    name="shifted-critical-path",
    summary="early recomputation, none on the last stage, one forward brought ahead",
    source="Lai et al. (Merak), TPDS 2023, section 5.1, figure 3c",
    ships_in=("Merak",),
    build=shifted_critical_path,
)
