"""Memory that follows from the order of operations alone, without times: activations in flight and weight copies.

Both are in units of one device's share of the model: with two stages per device, a stage counts one half.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.weight_versions import weight_versions

_CHANGE = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}  # of the micro-batches in flight


def peak_activations(schedule: Schedule) -> list[float]:
    """Per device, the most micro-batches whose activations it holds at a time: from F until B, or until W."""
    share = schedule.devices / (schedule.stages * schedule.parts)
    peaks = []
    for operations in schedule.operations:
        held = most = 0
        for operation in operations:
            held += _CHANGE.get(operation.kind, 0) * len(operation.micro_batches)
            most = max(most, held)
        peaks.append(most * share)
    return peaks


def in_flight(schedule: Schedule) -> list[int]:
    """Per stage, the most micro-batches, or parts of them, whose activations one of its replicas holds at a time."""
    most = [0] * schedule.stages
    held = dict.fromkeys(schedule.device_of, 0)
    for operation in chain.from_iterable(schedule.operations):
        replica = operation.stage, operation.pipe
        held[replica] += _CHANGE.get(operation.kind, 0) * len(operation.micro_batches)
        most[operation.stage] = max(most[operation.stage], held[replica])
    return most


@dataclass(frozen=True)
class Load:
    """Micro-batches, or parts of them, of which a device holds activations of one stage at a moment."""

    in_flight: int = 0  # from the forward until the backward, or until its input half
    recomputed: int = 0  # micro-batches in flight whose dropped activations are there again
    deferred: int = 0  # from the input half of the backward until the weight half


@dataclass(frozen=True)
class Holding:
    """What one pipeline device holds. ``versions`` and each moment's loads are in the order of ``stages``."""

    stages: tuple[int, ...]  # each once, also where several pipes flow through it here
    versions: tuple[int, ...]  # the most versions of each stage's weights at a time
    peaks: tuple[tuple[Load, ...], ...]  # the moments at which no other moment holds as much of everything


def holdings(schedule: Schedule) -> tuple[Holding, ...]:
    """What each pipeline device holds under ``schedule``.

    Activations of several stages on one device add up at one moment, not each at its own fullest: GEMS has two stages
    on a device and the activations of one micro-batch (Chimera, table 2).
    """
    alive = weight_versions(schedule)
    found = []
    for device, operations in enumerate(schedule.operations):
        own = [replica for replica, home in schedule.device_of.items() if home == device]
        stages = tuple(sorted({stage for stage, _ in own}))
        older = dict.fromkeys(stages, 0)
        for replica in own:
            older[replica[0]] += alive[replica] - 1
        peaks = _peaks(operations, stages, schedule.recompute)
        found.append(Holding(stages, tuple(1 + older[stage] for stage in stages), peaks))
    return tuple(found)


def _peaks(
    operations: Iterable[Operation], stages: Sequence[int], recompute: Collection[int]
) -> tuple[tuple[Load, ...], ...]:
    """The fullest moments of a device, each with a load for each of ``stages``."""
    place = {stage: 3 * number for number, stage in enumerate(stages)}
    held = [0] * (3 * len(stages))
    early: set[tuple[int, int, int]] = set()  # micro-batches that an operation of its own has recomputed
    moments = set()
    for operation in operations:
        if not operation.micro_batches:
            continue
        flights = place[operation.stage]
        again, deferred, count = flights + 1, flights + 2, len(operation.micro_batches)
        keys = {(operation.stage, operation.pipe, micro_batch) for micro_batch in operation.micro_batches}
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
            moments.add(tuple(held))
            held[flights] -= count
            held[again] -= count if operation.stage in recompute else 0
            held[deferred] += count if operation.kind is Kind.BACKWARD_INPUT else 0
        moments.add(tuple(held))
    highest = [
        one
        for one in moments
        if not any(one != other and all(a <= b for a, b in zip(one, other, strict=True)) for other in moments)
    ]
    return tuple(tuple(Load(*one[at : at + 3]) for at in place.values()) for one in sorted(highest))
