"""Merak's schedule: the critical path shifts from the last stage to the one before (Merak 2022, 6.1, figure 4c)."""

from auto3d.errors import InputError
from auto3d.schedule.alternation import alternate, of_stage
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.straight_pipeline import Order, alternating_orders, straight_pipeline
from auto3d.schedule.sync import place_syncs


def shifted_critical_path(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """Early recomputation with three changes; idle (D - 2)(F + B) per device where R = F and B <= 2F.

    The last stage does not recompute: it holds one micro-batch, whose activations are just made. The stage before it
    takes its third forward before its first backward, into the bubble, and holds three micro-batches for that. And the
    recomputations of its first two backwards follow those forwards.
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
    """One more forward ahead than in 1F1B, and for it two backwards in a row: F0 F1 F2, R0 B0, R1 B1, F3."""
    recomputes, backwards = (of_stage(kind, stage, micro_batches) for kind in (Kind.RECOMPUTE, Kind.BACKWARD))
    pairs: list[Order] = list(zip(recomputes, backwards, strict=True))
    if micro_batches > 1:
        pairs = [(*pairs[0], *pairs[1]), *pairs[2:]]
    return alternate(of_stage(Kind.FORWARD, stage, micro_batches), pairs, ahead=2)


FAMILY = Family(
    name="shifted-critical-path",
    summary="early recomputation, none on the last stage, one forward brought ahead (Merak 2022)",
    build=shifted_critical_path,
)
