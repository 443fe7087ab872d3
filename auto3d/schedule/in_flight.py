"""The activations in flight on each device and stage, counted from the order of operations, without times.

A micro-batch is in flight on a stage from its forward until its backward or, if the backward is split, until its weight
half.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.weight_versions import weight_versions

_CHANGE = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}  # change of the number in flight


def peak_activations(schedule: Schedule) -> list[float]:
    """Per device, the peak of the activations that it holds, in micro-batches.

    The unit is a micro-batch on all stages of a device with one pipe: with two stages per device, a stage counts 1/2.
    """
    unit = schedule.devices / (schedule.stages * schedule.parts)
    peaks = []
    for operations in schedule.operations:
        held = most = 0
        for operation in operations:
            held += _CHANGE.get(operation.kind, 0) * len(operation.micro_batches)
            most = max(most, held)
        peaks.append(most * unit)
    return peaks


def in_flight(schedule: Schedule) -> list[int]:
    """Per stage, the peak number of micro-batches, or of parts of them, in flight on one pipe."""
    most = [0] * schedule.stages
    held = dict.fromkeys(schedule.device_of, 0)
    for operation in chain.from_iterable(schedule.operations):
        pipe_stage = operation.stage, operation.pipe
        held[pipe_stage] += _CHANGE.get(operation.kind, 0) * len(operation.micro_batches)
        most[operation.stage] = max(most[operation.stage], held[pipe_stage])
    return most


@dataclass(frozen=True)
class Load:
    """The activations of one stage that a device holds at one moment, in micro-batches or in parts of them."""

    in_flight: int = 0  # from the forward until the backward, or until its input half
    recomputed: int = 0  # number of those in flight with recomputed activations
    deferred: int = 0  # from the input half of the backward until the weight half


@dataclass(frozen=True)
class Holding:
    """What one pipeline device holds. ``versions`` and the loads of each moment are in the order of ``stages``."""

    stages: tuple[int, ...]  # each once, even if it stands on several pipes of this device
    versions: tuple[int, ...]  # per stage: peak number of versions of its weights
    peaks: tuple[tuple[Load, ...], ...]  # the moments that no other moment reaches or exceeds in every count


def holdings(schedule: Schedule) -> tuple[Holding, ...]:
    """Per pipeline device, the activations and weight versions that it holds under ``schedule``.

    The activations of several stages on one device are added moment by moment, since their peaks need not coincide:
    GEMS has two stages per device, and the activations of one micro-batch (Chimera, table 2).
    """
    alive = weight_versions(schedule)
    held = []
    for device, operations in enumerate(schedule.operations):
        pipe_stages = [pipe_stage for pipe_stage, home in schedule.device_of.items() if home == device]
        stages = tuple(sorted({stage for stage, _ in pipe_stages}))
        older = dict.fromkeys(stages, 0)
        for stage, pipe in pipe_stages:
            older[stage] += alive[stage, pipe] - 1
        peaks = _peaks(operations, stages, schedule.recompute)
        held.append(Holding(stages, tuple(1 + older[stage] for stage in stages), peaks))
    return tuple(held)


def _peaks(
    operations: Sequence[Operation], stages: Sequence[int], recompute: Collection[int]
) -> tuple[tuple[Load, ...], ...]:
    """The peak moments of a device, each with one load per stage of ``stages``; see Holding."""
    counts = {counted for _, _, counted in moments(operations, stages, recompute)}
    highest: list[tuple[int, ...]] = []
    for one in sorted(counts, reverse=True):  # a moment comes after those that exceed it
        if not any(all(a <= b for a, b in zip(one, other, strict=True)) for other in highest):
            highest.append(one)
    return tuple(loads_of(one) for one in reversed(highest))


def loads_of(counts: Sequence[int]) -> tuple[Load, ...]:
    """One load per stage, from counts as ``moments`` yields them."""
    return tuple(Load(*counts[at : at + 3]) for at in range(0, len(counts), 3))


def moments(
    operations: Sequence[Operation], stages: Sequence[int], recompute: Collection[int]
) -> Iterator[tuple[int, bool, tuple[int, ...]]]:
    """Every change of what a device holds: (index of the operation, whether it changes at its end, counts).

    ``counts`` has the three fields of Load for each stage of ``stages``, one stage after the other.
    """
    place = {stage: 3 * number for number, stage in enumerate(stages)}
    held = [0] * (3 * len(stages))
    early: set[tuple[int, int, int]] = set()  # (stage, pipe, micro-batch) recomputed by an R before the backward
    for index, operation in enumerate(operations):
        if not operation.micro_batches:
            continue
        flights = place[operation.stage]
        again, deferred, count = flights + 1, flights + 2, len(operation.micro_batches)
        keys = {(operation.stage, operation.pipe, micro_batch) for micro_batch in operation.micro_batches}
        at_end = operation.kind not in (Kind.FORWARD, Kind.RECOMPUTE)
        if operation.kind is Kind.FORWARD:
            held[flights] += count
        elif operation.kind is Kind.RECOMPUTE:
            held[again] += count
            early |= keys
        elif operation.kind is Kind.BACKWARD_WEIGHT:
            held[deferred] -= count
        else:
            if operation.stage in recompute and not keys <= early:
                held[again] += count
            yield index, False, tuple(held)
            held[flights] -= count
            held[again] -= count if operation.stage in recompute else 0
            held[deferred] += count if operation.kind is Kind.BACKWARD_INPUT else 0
        yield index, at_end, tuple(held)
