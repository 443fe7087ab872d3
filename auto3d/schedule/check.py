"""The checker: proves that a Schedule is complete, in order and free of deadlock."""

from collections import defaultdict
from dataclasses import dataclass

from auto3d.errors import InputError
from auto3d.schedule.advance import advance_devices
from auto3d.schedule.dependencies import bounds, dependencies, numbered
from auto3d.schedule.operation import BACKWARDS, Kind, Operation, Schedule
from auto3d.words import counted


class ScheduleError(InputError):
    """A Schedule that would train wrongly or never end. The message names the operation."""


def check(schedule: Schedule) -> None:
    """Raise ScheduleError unless all of these hold for ``schedule``:

    - Every pipe has all stages, and every operation is on the device of its stage and pipe.
    - Every micro-batch passes every stage forward and backward exactly once, on one pipe. Its backward is one B, or I
      and then W. R comes at most once, between F and B, and only on stages that recompute. If the schedule is
      forward-only, every micro-batch passes every stage once, and there is nothing else.
    - If micro-batches have slices, each operation runs one slice. On every stage and pipe, the forwards of a
      micro-batch run from its first slice to its last, and the backwards from its last slice to its first: a slice uses
      the keys and values of the slices before it, whose gradients it makes.
    - Every stage and pipe is synced after the backwards that the sync sums, and updated after the sync. In a
      synchronous schedule that happens once, at the end, and no update comes before the last sync of its device. In a
      schedule with weight versions it may happen many times, and the n-th update of every stage sums the same
      micro-batches.
    - A weight version exists before a forward uses it, and no older version is used after a newer version.
    - All devices reach their last operation, even if every send is a rendezvous; see ``check_rendezvous``.
    """
    _check_devices(schedule)
    _check_complete(schedule)
    if schedule.slices > 1:
        _check_slices(schedule)
    if schedule.forward_only:
        _check_only_forwards(schedule)
    elif schedule.weight_version:
        _check_updates(schedule)
        _check_versions(schedule)
    else:
        _check_one_update(schedule)
    check_rendezvous(schedule)


def _check_devices(schedule: Schedule) -> None:
    for pipe in {pipe for _, pipe in schedule.device_of}:
        for stage in range(schedule.stages):
            home = schedule.device_of.get((stage, pipe))
            if home is None:
                raise ScheduleError(f"stage {stage} of pipe {pipe} is on no device")
            if not 0 <= home < schedule.devices:
                raise ScheduleError(f"stage {stage} of pipe {pipe} is on device {home}; there are {schedule.devices}")
    for device, operations in enumerate(schedule.operations):
        for operation in operations:
            home = schedule.device_of.get((operation.stage, operation.pipe))
            if home != device:
                where = "no device" if home is None else f"device {home}"
                raise ScheduleError(f"{operation} is on device {device}; its stage is on {where}")


def _check_complete(schedule: Schedule) -> None:
    width = _width(schedule)
    last: list[Kind | None] = [None] * (schedule.stages * width)  # last kind, by stage * width + micro-batch
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
                    position = f"follows {before}" if before else "comes first"
                    raise ScheduleError(
                        f"{_one(operation, m)} {position} of this micro-batch on this stage; "
                        "the order is F, then R if the stage recomputes, then B or I and W, each once"
                    )
                last[place] = operation.kind
    final = (Kind.FORWARD,) if schedule.forward_only else _FINAL
    for place, kind in enumerate(last):
        if kind not in final:
            missing = Kind.FORWARD if kind is None else Kind.BACKWARD
            if kind is Kind.BACKWARD_INPUT:
                missing = Kind.BACKWARD_WEIGHT
            stage, m = divmod(place, width)
            operation = Operation(missing, stage, (m,), pipe_of[m] or 0)
            raise ScheduleError(f"{operation} is missing; it must run once")


_AFTER: dict[Kind, tuple[Kind | None, ...]] = {
    Kind.FORWARD: (None,),
    Kind.RECOMPUTE: (Kind.FORWARD,),
    Kind.BACKWARD: (Kind.FORWARD, Kind.RECOMPUTE),
    Kind.BACKWARD_INPUT: (Kind.FORWARD, Kind.RECOMPUTE),
    Kind.BACKWARD_WEIGHT: (Kind.BACKWARD_INPUT,),
}
_FINAL = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


def _check_slices(schedule: Schedule) -> None:
    """Check the operations of a complete schedule whose micro-batches have slices: see ``check``."""
    slices = schedule.slices
    if schedule.parts != slices:
        raise ScheduleError(
            f"schedule {schedule.name}: its micro-batches have {slices} slices and {schedule.parts} parts; slices are "
            "the only parts"
        )
    next_slice: dict[tuple[Kind, int, int, int], int] = {}  # (F or B, stage, pipe, micro-batch) -> slice; B is I too
    for operation in numbered(schedule):
        if len(operation.micro_batches) > 1:
            raise ScheduleError(f"{operation} runs {len(operation.micro_batches)} slices; it must run 1")
        if operation.kind is Kind.FORWARD:
            kind, first, step, order = Kind.FORWARD, 0, 1, "forwards run from the first slice to the last"
        elif operation.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            kind, first, step, order = Kind.BACKWARD, slices - 1, -1, "backwards run from the last slice to the first"
        else:
            continue
        micro_batch, number = divmod(operation.micro_batches[0], slices)
        key = kind, operation.stage, operation.pipe, micro_batch
        expected = next_slice.get(key, first)
        if number != expected:
            raise ScheduleError(
                f"{operation} is slice {number} of micro-batch {micro_batch}, before {expected}; {order}"
            )
        next_slice[key] = number + step


def _check_only_forwards(schedule: Schedule) -> None:
    for operation in numbered(schedule):
        if operation.kind is not Kind.FORWARD:
            raise ScheduleError(f"{operation} is no forward; the schedule is forward-only")


def _check_one_update(schedule: Schedule) -> None:
    for device, operations in enumerate(schedule.operations):
        pipe_stages = {pipe_stage for pipe_stage, home in schedule.device_of.items() if home == device}
        synced: set[tuple[int, int]] = set()
        updated: set[tuple[int, int]] = set()
        for operation in operations:
            pipe_stage = (operation.stage, operation.pipe)
            if operation.kind is Kind.SYNC:
                if updated:
                    raise ScheduleError(
                        f"{operation} follows an update on device {device}; the norm for clipping needs all gradients"
                    )
                if pipe_stage in synced:
                    raise ScheduleError(f"{operation} comes twice; it must run once")
                synced.add(pipe_stage)
            elif operation.kind is Kind.UPDATE:
                if synced != pipe_stages:
                    stage, pipe = min(pipe_stages - synced)
                    missing = Operation(Kind.SYNC, stage, (), pipe)
                    raise ScheduleError(f"{operation} comes before {missing} on device {device}")
                if pipe_stage in updated:
                    raise ScheduleError(f"{operation} comes twice; it must run once")
                updated.add(pipe_stage)
            elif pipe_stage in synced:
                raise ScheduleError(f"{operation} follows the S of its stage; S must follow the last backward")
        if updated != pipe_stages:
            stage, pipe = min(pipe_stages - updated)
            raise ScheduleError(f"{Operation(Kind.UPDATE, stage, (), pipe)} is missing; it must run once")


def _check_updates(schedule: Schedule) -> None:
    """Check the syncs and updates of a schedule that updates each stage many times: see ``check``."""
    first: list[frozenset[int]] | None = None
    for (stage, pipe), device in schedule.device_of.items():
        summed: list[frozenset[int]] = []
        gradients: set[int] = set()
        synced = False
        for operation in schedule.operations[device]:
            if (operation.stage, operation.pipe) != (stage, pipe):
                continue
            if operation.kind is Kind.UPDATE:
                if not synced:
                    raise ScheduleError(f"{operation}, number {len(summed) + 1}, comes without an S before it")
                summed.append(frozenset(gradients))
                gradients, synced = set(), False
            elif operation.kind is Kind.SYNC:
                if synced or not gradients:
                    raise ScheduleError(f"{operation} before update {len(summed) + 1} has no new gradients to sync")
                synced = True
            elif operation.kind in BACKWARDS:
                if synced:
                    raise ScheduleError(f"{operation} adds to gradients that are being synced; it must follow the U")
                if operation.kind is not Kind.BACKWARD_INPUT:
                    gradients.update(operation.micro_batches)
        if gradients:
            raise ScheduleError(
                f"U@{stage} is missing at the end: gradients of micro-batch {min(gradients)} are unused"
            )
        first = first or summed
        if summed != first:
            at = next((n for n, pair in enumerate(zip(first, summed, strict=False)) if pair[0] != pair[1]), len(first))
            raise ScheduleError(
                f"U@{stage}, number {at + 1}, sums other micro-batches than the updates of other stages"
            )


def _check_versions(schedule: Schedule) -> None:
    """Check that each version exists when a forward uses it and that no newer version was used before."""
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
                            f"{_one(operation, m)} uses weight version {version} after only "
                            f"{counted(updates, 'update')}"
                        )
                    if version < newest_used:
                        raise ScheduleError(
                            f"{_one(operation, m)} uses weight version {version} after version {newest_used} was used"
                        )
                    newest_used = version


@dataclass(frozen=True, slots=True)
class _Send:
    target: int  # number of the operation that uses the message
    receiver: int  # device of that operation
    posted: int  # number of operations that the receiver has ended when it posts the receive


def check_rendezvous(schedule: Schedule) -> None:
    """Check that all devices reach their last operation when each holds very few messages.

    A message crosses devices if an operation uses a result of another device. Messages of one kind (activations or
    gradients) from one stage of one pipe to one device form a channel. A device posts ``held_ahead`` receives per
    channel, for the messages that it uses next; it posts one more once it has ended an operation that used a message of
    the channel. A send is a rendezvous: it completes when its receive is posted. Until then the sender runs other
    operations, but begins none that sends to the same device. A channel keeps the order of its messages.

    So a device holds the messages of one operation to each of its peers, and ``held_ahead`` messages of each channel.
    Most schedules of the papers need one message. If a device completed all its sends before its next operation, or
    posted one receive at a time, two neighbours of interleaved 1F1B, of ZB-V or of Chimera's doubling would each wait
    for the other to receive. Gradient syncs run in the background and an update waits only for them, so neither can
    block.
    """
    operations = numbered(schedule)
    needs = dependencies(schedule)
    device_of: list[int] = []
    index_of: list[int] = []
    for device, device_operations in enumerate(schedule.operations):
        device_of += [device] * len(device_operations)
        index_of += range(len(device_operations))
    sends: list[list[_Send]] = [[] for _ in operations]
    # channel -> (number of the sending operation, operations that the receiver has ended after the use) per message
    channels: defaultdict[tuple[Kind, int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for number, needed in enumerate(needs):
        receiver = device_of[number]
        for source in dict.fromkeys(needed):
            if device_of[source] != receiver:
                made = operations[source]
                uses = channels[made.kind, made.stage, made.pipe, receiver]
                if uses and source < uses[-1][0]:
                    raise ScheduleError(
                        f"deadlock: {operations[number]} uses the message of {made}, and an operation before it uses "
                        f"that of {operations[uses[-1][0]]}, which is sent later"
                    )
                posted = uses[-schedule.held_ahead][1] if len(uses) >= schedule.held_ahead else 0
                sends[source].append(_Send(number, receiver, posted))
                uses.append((source, index_of[number] + 1))

    first = bounds(schedule)
    ended = [0] * schedule.devices  # number of operations ended, per device
    unmet: list[list[_Send]] = [[] for _ in range(schedule.devices)]  # sends whose receive was not posted yet

    def blocking(device: int, number: int) -> list[_Send]:
        peers = {send.receiver for send in sends[number]}
        return [send for send in unmet[device] if send.receiver in peers and ended[send.receiver] < send.posted]

    def run_next(device: int, index: int) -> bool:
        number = first[device] + index
        for need in needs[number]:
            if ended[device_of[need]] <= index_of[need]:
                return False
        if sends[number]:
            if unmet[device] and blocking(device, number):
                return False
            unmet[device] = [send for send in unmet[device] if ended[send.receiver] < send.posted]
            unmet[device] += sends[number]
        return True

    advance_devices(ended, [len(operations) for operations in schedule.operations], run_next)
    stuck = []
    for device, device_operations in enumerate(schedule.operations):
        if ended[device] < len(device_operations):
            number = first[device] + ended[device]
            targets = ", ".join(str(operations[send.target]) for send in blocking(device, number))
            why = f" (no receive is posted for its message to {targets})" if targets else ""
            stuck.append(f"device {device} before {operations[number]}{why}")
    if stuck:
        raise ScheduleError(f"deadlock: {'; '.join(stuck)}")


def _width(schedule: Schedule) -> int:
    return schedule.micro_batches * schedule.parts * schedule.iterations


def _one(operation: Operation, micro_batch: int) -> Operation:
    return Operation(operation.kind, operation.stage, (micro_batch,), operation.pipe)
