"""Proof, by walking through it, that a Schedule is right: complete, in order, free of deadlock."""

from dataclasses import dataclass

from auto3d.errors import InputError
from auto3d.schedule.advance import advance_devices
from auto3d.schedule.dependencies import bounds, dependencies, numbered
from auto3d.schedule.operation import BACKWARDS, Kind, Operation, Schedule


class ScheduleError(InputError):
    """A Schedule that would train wrongly, or never end; the message names the operation."""


def check(schedule: Schedule) -> None:
    """Raise ScheduleError unless ``schedule`` is right.

    Proved:

    - every operation is on the device where its stage of its pipe lives, and every pipe has all stages;
    - every micro-batch passes every stage forward and backward exactly once, all in one pipe, the backward as one B or
      as I and then W; R at most once, between F and B, and only on stages that recompute;
    - each replica of a stage is synced after the backwards it sums and updated after that: once at the end, and not
      before all syncs of its device; or, where the schedule says weight versions, any number of times, with the same
      micro-batches in the n-th update of every stage;
    - a weight version is made before a forward uses it, and no older one is used after a newer one;
    - all devices come to their end, in dependency order, even if every send is a rendezvous: see ``_check_progress``.
    """
    _check_homes(schedule)
    _check_complete(schedule)
    if schedule.weight_version:
        _check_updates(schedule)
        _check_versions(schedule)
    else:
        _check_one_update(schedule)
    _check_progress(schedule)


def _check_homes(schedule: Schedule) -> None:
    for pipe in {pipe for _, pipe in schedule.device_of}:
        for stage in range(schedule.stages):
            home = schedule.device_of.get((stage, pipe))
            if home is None or not 0 <= home < schedule.devices:
                raise ScheduleError(f"stage {stage} of pipe {pipe} lives on device {home} of {schedule.devices}")
    for device, operations in enumerate(schedule.operations):
        for operation in operations:
            home = schedule.device_of.get((operation.stage, operation.pipe))
            if home != device:
                where = "nowhere" if home is None else f"on device {home}"
                raise ScheduleError(f"{operation} is on device {device}; its stage lives {where}")


def _check_complete(schedule: Schedule) -> None:
    width = _width(schedule)
    last: list[Kind | None] = [None] * (schedule.stages * width)  # kind of the last operation, by stage and micro-batch
    pipe_of: list[int | None] = [None] * width
    for operations in schedule.operations:
        for operation in operations:
            if bool(operation.micro_batches) is (operation.kind in (Kind.SYNC, Kind.UPDATE)):
                raise ScheduleError(f"{operation} has {len(operation.micro_batches)} micro-batches")
            if operation.kind is Kind.RECOMPUTE and operation.stage not in schedule.recompute:
                raise ScheduleError(f"{operation}: stage {operation.stage} does not recompute")
            for m in operation.micro_batches:
                if not 0 <= m < width:
                    raise ScheduleError(f"{_one(operation, m)} is outside the schedule's {width} micro-batches")
                if pipe_of[m] is None:
                    pipe_of[m] = operation.pipe
                if pipe_of[m] != operation.pipe:
                    raise ScheduleError(f"{_one(operation, m)}: micro-batch {m} is on pipe {pipe_of[m]} elsewhere")
                place = operation.stage * width + m
                before = last[place]
                if before not in _AFTER[operation.kind]:
                    so_far = f"follows {before}" if before else "comes first"
                    raise ScheduleError(
                        f"{_one(operation, m)} {so_far} of this micro-batch on this stage; "
                        "each is done once, in the order F, R where recomputed, then B or I W"
                    )
                last[place] = operation.kind
    for place, kind in enumerate(last):
        if kind not in _FINAL:
            missing = {None: Kind.FORWARD, Kind.BACKWARD_INPUT: Kind.BACKWARD_WEIGHT}.get(kind, Kind.BACKWARD)
            stage, m = divmod(place, width)
            operation = Operation(missing, stage, (m,), pipe_of[m] or 0)
            raise ScheduleError(f"{operation} is done 0 times; it must be done once")


_AFTER: dict[Kind, tuple[Kind | None, ...]] = {
    Kind.FORWARD: (None,),
    Kind.RECOMPUTE: (Kind.FORWARD,),
    Kind.BACKWARD: (Kind.FORWARD, Kind.RECOMPUTE),
    Kind.BACKWARD_INPUT: (Kind.FORWARD, Kind.RECOMPUTE),
    Kind.BACKWARD_WEIGHT: (Kind.BACKWARD_INPUT,),
}
_FINAL = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


def _check_one_update(schedule: Schedule) -> None:
    for device, operations in enumerate(schedule.operations):
        replicas = {replica for replica, home in schedule.device_of.items() if home == device}
        synced: set[tuple[int, int]] = set()
        updated: set[tuple[int, int]] = set()
        for operation in operations:
            replica = (operation.stage, operation.pipe)
            if operation.kind is Kind.SYNC:
                if updated:
                    raise ScheduleError(
                        f"{operation} follows an update on device {device}; the norm for clipping needs all gradients"
                    )
                if replica in synced:
                    raise ScheduleError(f"{operation} is done twice; it must be done once")
                synced.add(replica)
            elif operation.kind is Kind.UPDATE:
                if synced != replicas:
                    stage, pipe = min(replicas - synced)
                    missing = Operation(Kind.SYNC, stage, (), pipe)
                    raise ScheduleError(f"{operation} comes before {missing} on device {device}")
                if replica in updated:
                    raise ScheduleError(f"{operation} is done twice; it must be done once")
                updated.add(replica)
            elif replica in synced:
                raise ScheduleError(f"{operation} follows the S of its replica; S must follow its last backward")
        if updated != replicas:
            stage, pipe = min(replicas - updated)
            raise ScheduleError(f"{Operation(Kind.UPDATE, stage, (), pipe)} is done 0 times; it must be done once")


def _check_updates(schedule: Schedule) -> None:
    """Syncs and updates where each stage is updated many times: what the n-th update sums is the same everywhere."""
    first: list[frozenset[int]] | None = None
    for (stage, pipe), device in schedule.device_of.items():
        own = [o for o in schedule.operations[device] if (o.stage, o.pipe) == (stage, pipe)]
        summed: list[frozenset[int]] = []
        gradients: set[int] = set()
        synced = False
        for operation in own:
            if operation.kind is Kind.UPDATE:
                if not synced:
                    raise ScheduleError(f"{operation}, number {len(summed) + 1}, has no S before it")
                summed.append(frozenset(gradients))
                gradients, synced = set(), False
            elif operation.kind is Kind.SYNC:
                if synced or not gradients:
                    raise ScheduleError(f"{operation} before update {len(summed) + 1} has nothing new to sync")
                synced = True
            elif operation.kind in BACKWARDS:
                if synced:
                    raise ScheduleError(f"{operation} adds to gradients that are being synced; U must come first")
                if operation.kind is not Kind.BACKWARD_INPUT:
                    gradients.update(operation.micro_batches)
        if gradients:
            raise ScheduleError(
                f"U@{stage} is missing at the end: gradients of micro-batch {min(gradients)} are unused"
            )
        first = first or summed
        if summed != first:
            at = next((n for n, pair in enumerate(zip(first, summed, strict=False)) if pair[0] != pair[1]), len(first))
            raise ScheduleError(f"U@{stage}, number {at + 1}, sums other micro-batches than other stages' updates do")


def _check_versions(schedule: Schedule) -> None:
    """Forwards use versions that their stage has made, and never an older one after a newer: it would be dropped."""
    for (stage, pipe), device in schedule.device_of.items():
        updates = newest_used = 0
        for operation in schedule.operations[device]:
            if (operation.stage, operation.pipe) != (stage, pipe):
                continue
            if operation.kind is Kind.UPDATE:
                updates += 1
            elif operation.kind is Kind.FORWARD:
                for m in operation.micro_batches:
                    version = schedule.weight_version.get((stage, m))
                    if version is None:
                        raise ScheduleError(f"{_one(operation, m)} has no weight version")
                    if version > updates:
                        raise ScheduleError(
                            f"{_one(operation, m)} uses weight version {version}; there were {updates} updates"
                        )
                    if version < newest_used:
                        raise ScheduleError(
                            f"{_one(operation, m)} uses weight version {version} after version {newest_used} was used"
                        )
                    newest_used = version


@dataclass(frozen=True, slots=True)
class _Send:
    target: int  # number of the operation that uses the message
    receiver: int  # its device
    posted: int  # how many operations the receiver has ended when it posts the receive


def _check_progress(schedule: Schedule) -> None:
    """Walk all devices to their end, with little room for messages.

    A message goes from device to device where an operation uses what another made. Messages of one kind (F, or the
    gradient) from one stage of one pipe form a channel. A device has one receive posted per channel, for the message
    that it uses next, from when it has ended the operation that used the one before. A send is a rendezvous, met when
    its receive is posted; meanwhile a device does other work, but begins no operation that sends to the same device.

    So a device holds the messages of one operation to each of its peers, and one message from each channel. The papers'
    schedules need that much: if a device met all its sends before its next operation, or posted one receive at a time,
    two neighbours of an interleaved 1F1B, of ZB-V or of Chimera's doubling would each wait for the other to receive.
    Gradient syncs are started, not waited for, and an update waits for nothing else, so neither can block.
    """
    operations = numbered(schedule)
    needs = dependencies(schedule)
    device_of: list[int] = []
    index_of: list[int] = []
    for device, own in enumerate(schedule.operations):
        device_of += [device] * len(own)
        index_of += range(len(own))
    sends: list[list[_Send]] = [[] for _ in operations]
    consumed: dict[tuple[Kind, int, int, int], int] = {}  # channel and receiver -> operations ended after the last use
    for number, needed in enumerate(needs):
        receiver = device_of[number]
        for source in dict.fromkeys(needed):
            if device_of[source] != receiver:
                made = operations[source]
                channel = (made.kind, made.stage, made.pipe, receiver)
                sends[source].append(_Send(number, receiver, consumed.get(channel, 0)))
                consumed[channel] = index_of[number] + 1

    first = bounds(schedule)
    position = [0] * schedule.devices  # operations ended, per device
    unmet: list[list[_Send]] = [[] for _ in range(schedule.devices)]

    def blocking(device: int, number: int) -> list[_Send]:
        peers = {send.receiver for send in sends[number]}
        return [send for send in unmet[device] if send.receiver in peers and position[send.receiver] < send.posted]

    def run_next(device: int, index: int) -> bool:
        number = first[device] + index
        for need in needs[number]:
            if position[device_of[need]] <= index_of[need]:
                return False
        if sends[number]:
            if unmet[device] and blocking(device, number):
                return False
            unmet[device] = [send for send in unmet[device] if position[send.receiver] < send.posted]
            unmet[device] += sends[number]
        return True

    advance_devices(position, [len(own) for own in schedule.operations], run_next)
    stuck = []
    for device, own in enumerate(schedule.operations):
        if position[device] < len(own):
            number = first[device] + position[device]
            waiting = ", ".join(str(operations[send.target]) for send in blocking(device, number))
            why = f" (its send to {waiting} is not met)" if waiting else ""
            stuck.append(f"device {device} before {own[position[device]]}{why}")
    if stuck:
        raise ScheduleError(f"deadlock: {'; '.join(stuck)}")


def _width(schedule: Schedule) -> int:
    return schedule.micro_batches * schedule.parts * schedule.iterations


def _one(operation: Operation, micro_batch: int) -> Operation:
    return Operation(operation.kind, operation.stage, (micro_batch,), operation.pipe)
