"""Merak's schedule: the critical path shifts from the last stage to the one before (Merak 2022, 6.1, figure 4c)."""

from auto3d.errors import InputError
from auto3d.schedule.alternation import alternate, of_stage
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.sync import place_syncs


def shifted_critical_path(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """Early recomputation with three changes; idle (D - 2)(F + B) per device where R = F and B <= 2F.

    The last stage does not recompute: it holds one micro-batch, whose activations are just made. The stage before it
    takes its third forward before its first backward, into the bubble, and holds three micro-batches for that. And the
    recomputations of its first two backwards follow those forwards.
    """
    if devices < 2:
        raise InputError("schedule shifted-critical-path: 1 device; it moves work between 2 devices or more")
    last = devices - 1

    def device(stage: int) -> tuple[Operation, ...]:
        forwards = of_stage(Kind.FORWARD, stage, micro_batches)
        recomputes, backwards = (of_stage(kind, stage, micro_batches) for kind in (Kind.RECOMPUTE, Kind.BACKWARD))
        if stage == last:
            return alternate(forwards, [(backward,) for backward in backwards], ahead=0)
        pairs = list(zip(recomputes, backwards, strict=True))
        if stage == last - 1:  # one forward more ahead, and with it two backwards in a row: F0 F1 F2, R0 B0, R1 B1, F3
            joined = [(*pairs[0], *pairs[1]), *pairs[2:]] if micro_batches > 1 else pairs
            return alternate(forwards, joined, ahead=2)
        return alternate(forwards, pairs, ahead=last - stage)

    schedule = Schedule(
        name="shifted-critical-path",
        stages=devices,
        micro_batches=micro_batches,
        device_of={(stage, 0): stage for stage in range(devices)},
        operations=tuple(device(stage) for stage in range(devices)),
        recompute=frozenset(range(last)),
    )
    return place_syncs(schedule, sync)


FAMILY = Family(
    name="shifted-critical-path",
    summary="early recomputation, none on the last stage, one forward brought ahead (Merak 2022)",
    build=shifted_critical_path,
)
