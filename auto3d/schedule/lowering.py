"""Lowering: from a schedule to one program per pipeline device.

A schedule lists no sends, receives or collectives. This pass derives them from the values that cross stages and from
the parameters that several ranks hold.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence

from auto3d.partition.stage import Transfer
from auto3d.schedule.advance import advance_devices
from auto3d.schedule.check import ScheduleError
from auto3d.schedule.common_order import check_progress, common_order, communications_before
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.program import Communication, Message, PipeStage, Program, Step

# Units of time of an operation, 1 unless listed: the common order of steps should be close to the order of a real run.
_UNITS = {Kind.BACKWARD: 2}
# A device keeps at most this many sent messages per peer, unless one step sends more. It limits how far a sender can be
# ahead of its receiver.
SENT_AT_MOST = 4


def lower(
    schedule: Schedule, transfers: Sequence[Transfer], summed: Collection[tuple[int, ...]] = ()
) -> tuple[Program, ...]:
    """The program of each pipeline device. Raises ScheduleError if not all operations can run.

    ``transfers`` are the values that cross stages. ``summed`` has the sets of stages whose gradients are summed over
    ranks: (0,) is for parameters that only stage 0 uses, (0, 3) for parameters that the stages 0 and 3 share.

    ``common_order`` explains when receives are posted and sums start.
    """
    downstream: dict[int, list[int]] = defaultdict(list)
    upstream: dict[int, list[int]] = defaultdict(list)
    for source, target in sorted({(t.source, t.target) for t in transfers}):
        downstream[source].append(target)
        upstream[target].append(source)
    with_gradient = {(transfer.source, transfer.target) for transfer in transfers if transfer.value.differentiable}

    def messages(operation: Operation) -> tuple[list[Message], list[Message]]:
        """The messages that the operation receives, and the messages that it sends."""
        stage, pipe, numbers = operation.stage, operation.pipe, operation.micro_batches
        if operation.kind is Kind.FORWARD:
            received = [Message(Kind.FORWARD, source, stage, m, pipe) for m in numbers for source in upstream[stage]]
            sent = [Message(Kind.FORWARD, stage, target, m, pipe) for m in numbers for target in downstream[stage]]
            return received, sent
        if operation.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            users = [target for target in downstream[stage] if (stage, target) in with_gradient]
            makers = [source for source in upstream[stage] if (source, stage) in with_gradient]
            received = [Message(Kind.BACKWARD, target, stage, m, pipe) for m in numbers for target in users]
            return received, [Message(Kind.BACKWARD, stage, source, m, pipe) for m in numbers for source in makers]
        return [], []

    received: list[list[list[Message]]] = [[] for _ in schedule.operations]  # [device][step]
    sent: list[list[list[Message]]] = [[] for _ in schedule.operations]
    walked: list[tuple[int, int]] = []  # (end, device) of each step, in the order of the walk
    syncs = _Syncs(schedule, summed)
    ends = [0] * schedule.devices
    sent_at: dict[Message, int] = {}  # message -> end of the step that sends it

    def run_next(device: int, index: int) -> bool:
        operation = schedule.operations[device][index]
        receives, sends = messages(operation)
        if any(message not in sent_at for message in receives) or not syncs.are_done_for(operation):
            return False
        begin = max([ends[device], syncs.end_for(operation), *(sent_at[message] for message in receives)])
        ends[device] = begin + _UNITS.get(operation.kind, 1) * len(operation.micro_batches)
        syncs.note(operation, ends[device])
        walked.append((ends[device], device))
        sent_at.update(dict.fromkeys(sends, ends[device]))
        received[device].append(receives)
        sent[device].append(sends)
        return True

    totals = [len(operations) for operations in schedule.operations]
    ended = [0] * schedule.devices
    advance_devices(ended, totals, run_next)
    if ended != totals:
        stuck = [device for device, total in enumerate(totals) if ended[device] < total]
        where = ", ".join(f"device {device} at {schedule.operations[device][ended[device]]}" for device in stuck)
        raise ScheduleError(f"deadlock: {where}")
    before = communications_before(schedule, sent, common_order(walked, schedule.devices), summed)
    released = _releases([device for _, device in walked], received, sent, before)
    programs = tuple(
        Program(
            steps=tuple(
                Step(operation, begins, tuple(receives), tuple(sends), tuple(releases))
                for operation, begins, receives, sends, releases in zip(
                    operations, before[device], received[device], sent[device], released[device], strict=True
                )
            ),
            versions=_versions(schedule, device),
            iterations=schedule.iterations,
            updates=schedule.updates,
            asynchronous=bool(schedule.weight_version),
        )
        for device, operations in enumerate(schedule.operations)
    )
    check_progress(programs, schedule.device_of)
    return programs


def _releases(
    walk: Sequence[int],
    received: Sequence[Sequence[Sequence[Message]]],
    sent: Sequence[Sequence[Sequence[Message]]],
    before: Sequence[Sequence[Sequence[Communication]]],
) -> list[list[list[Message]]]:
    """Per device and step, the messages sent by earlier steps that it releases: it waits for their sends, then frees
    them.

    A device keeps a vector clock. It releases a message at the first step at which a chain of messages proves that the
    receiver has posted the receive: then it waits no longer than the transfer takes. While messages go only one way,
    nothing proves that. The oldest message is then released when the device would keep more than SENT_AT_MOST for one
    peer, and the device waits for a receiver that is that far behind. ``walk`` has the devices of all steps, in an
    order in which the steps can run.
    """
    posted_before = {  # message -> (receiver, step of the receiver before which it posts the receive)
        communication: (device, number)
        for device, steps in enumerate(before)
        for number, communications in enumerate(steps)
        for communication in communications
        if isinstance(communication, Message)
    }
    devices = len(sent)
    released: list[list[list[Message]]] = [[] for _ in range(devices)]
    clock = [[0] * devices for _ in range(devices)]  # [device][peer]: number of steps that peer has surely ended
    sent_at: dict[Message, list[int]] = {}  # message -> clock of the sender
    # [device][peer]: messages sent there, in order, each with the peer's step before which it posts the receive
    unreleased: list[dict[int, deque[tuple[int, Message]]]] = [defaultdict(deque) for _ in range(devices)]
    for device in walk:
        step = len(released[device])
        for message in received[device][step]:
            clock[device] = [max(pair) for pair in zip(clock[device], sent_at[message], strict=True)]
        clock[device][device] += 1
        released[device].append([])
        crossing = [message for message in sent[device][step] if message in posted_before]
        added = Counter(posted_before[message][0] for message in crossing)
        for peer, kept in unreleased[device].items():
            while kept and (kept[0][0] < clock[device][peer] or len(kept) + added[peer] > SENT_AT_MOST):
                released[device][step].append(kept.popleft()[1])
        sent_at.update((message, list(clock[device])) for message in sent[device][step])
        for message in crossing:
            peer, receiving_step = posted_before[message]
            unreleased[device][peer].append((receiving_step, message))
    return released


class _Syncs:
    """The syncs that each update waits for.

    In a synchronous schedule an update waits for all syncs, since clipping uses the norm of all gradients. In an
    asynchronous one it waits for the syncs of its stage and of stages that share parameters with it.
    """

    def __init__(self, schedule: Schedule, summed: Collection[tuple[int, ...]]) -> None:
        self._ends: dict[PipeStage, list[int]] = {pipe_stage: [] for pipe_stage in schedule.device_of}
        self._updates: Counter[PipeStage] = Counter()
        self._before: dict[int, list[PipeStage]] = {}
        for stage in range(schedule.stages):
            together = {stage}.union(*(stages for stages in summed if stage in stages))
            self._before[stage] = [
                pipe_stage for pipe_stage in self._ends if not schedule.weight_version or pipe_stage[0] in together
            ]

    def are_done_for(self, operation: Operation) -> bool:
        number = self._updates[operation.stage, operation.pipe]
        return operation.kind is not Kind.UPDATE or all(
            len(self._ends[pipe_stage]) > number for pipe_stage in self._before[operation.stage]
        )

    def end_for(self, operation: Operation) -> int:
        """The end of the last sync that ``operation`` waits for; 0 if it is not an update."""
        if operation.kind is not Kind.UPDATE:
            return 0
        number = self._updates[operation.stage, operation.pipe]
        return max(self._ends[pipe_stage][number] for pipe_stage in self._before[operation.stage])

    def note(self, operation: Operation, end: int) -> None:
        pipe_stage = operation.stage, operation.pipe
        if operation.kind is Kind.SYNC:
            self._ends[pipe_stage].append(end)
        elif operation.kind is Kind.UPDATE:
            self._updates[pipe_stage] += 1


def _versions(schedule: Schedule, device: int) -> dict[PipeStage, dict[int, int]]:
    versions: dict[PipeStage, dict[int, int]] = {
        pipe_stage: {} for pipe_stage, home in schedule.device_of.items() if home == device
    }
    for operation in schedule.operations[device]:
        if operation.kind is Kind.FORWARD:
            for m in operation.micro_batches:
                version = schedule.weight_version.get((operation.stage, m), 0)
                versions[operation.stage, operation.pipe][m] = version
    return versions
