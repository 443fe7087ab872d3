"""Schedules for tests: every family with all its options at a given size, and schedules written by hand."""

from collections.abc import Iterator
from itertools import product

from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.operation import Schedule, parse

SYNC = ("lazy", "eager", "eager-opt")
BY_RULE = [name for name, family in SCHEDULES.items() if not family.explicit]  # schedules that exist at any size


def options_of(name: str, devices: int) -> list[dict[str, int | str]]:
    """Every combination of the options that change the forwards and backwards of ``name``; [] if no size is valid.

    A new schedule needs an entry only if it has such options, or if it cannot run on every number of devices.
    """
    if name == "interleaved-1f1b":
        return [{"chunks": chunks} for chunks in (2, 3, 4)]
    if name == "interleaved-zero-bubble":
        return [{"chunks": 3}]
    if name == "hanayo":
        return [{"waves": waves} for waves in (1, 2)]
    if name == "chimera":
        halves = [] if devices % 2 else [f for f in range(1, devices // 2 + 1) if devices // 2 % f == 0]
        scales = ("direct", "doubling", "halving")
        return [{"pipes": 2 * f, "scale": scale} for f, scale in product(halves, scales)]
    if name == "seq1f1b":
        return [{"slices": slices} for slices in (1, 2, 5)]
    if name in ("zb-1p", "zb-2p"):
        return [{"times": "3-5-2-1", "deferred": 40}]
    if name in ("pipedream", "pipedream-2bw"):
        return [{"iterations": iterations} for iterations in (1, 3)]
    return [] if name in ("gems", "shifted-critical-path") and devices == 1 else [{}]


def sizes(devices: int) -> list[int]:
    """Numbers of micro-batches up to 4D: those near the multiples of D, where schedules change."""
    near = (1, 2, devices - 1, devices, devices + 1, 2 * devices - 1, 2 * devices, 2 * devices + 1, 3 * devices + 2)
    return sorted({number for number in (*near, 4 * devices) if 1 <= number <= 4 * devices})


def least_micro_batches(name: str, devices: int) -> int:
    return max(1, devices - 1) if name == "pipedream-2bw" else 1


def schedules(name: str, devices: int, numbers: list[int], syncs: tuple[str, ...] = SYNC) -> Iterator[Schedule]:
    """``name`` with all its options at all ``numbers`` of micro-batches. It recomputes at odd numbers."""
    options_taken = SCHEDULES[name].options
    for micro_batches, options, sync in product(numbers, options_of(name, devices), syncs):
        if micro_batches >= least_micro_batches(name, devices):
            recompute = {"recompute": "full" if micro_batches % 2 else "none"} if "recompute" in options_taken else {}
            yield build_schedule(name, devices=devices, micro_batches=micro_batches, sync=sync, **options, **recompute)


def by_hand(*lines: str, stages: int = 2, micro_batches: int = 2, **fields) -> Schedule:
    fields.setdefault("device_of", {(stage, 0): stage for stage in range(stages)})
    return Schedule(
        name="by hand",
        stages=stages,
        micro_batches=micro_batches,
        operations=tuple(tuple(parse(word) for word in line.split()) for line in lines),
        **fields,
    )
