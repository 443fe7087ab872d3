"""Operations -> programs: a schedule's operations with the messages and the sums over ranks that go with each.

Schedules do not write sends, receives and collectives; this pass derives them from the values that cross stages and
from the weights that ranks share.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence

from auto3d.partition.stage import Transfer
from auto3d.schedule.advance import advance_devices
from auto3d.schedule.check import ScheduleError
from auto3d.schedule.common_order import beginnings, check_progress, common_order
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.program import Communication, Message, PipeStage, Program, Step

# How long operations take, for the common order of steps, which should follow real times.
_UNITS = {Kind.BACKWARD: 2}
# Messages to one peer that a device holds, unless one step sends more: it may be so far ahead of its receiver.
SENT_AT_MOST = 4


def lower(
    schedule: Schedule, transfers: Sequence[Transfer], shared: Collection[tuple[int, ...]] = ()
) -> tuple[Program, ...]:
    """The program of each pipeline device; raises ScheduleError if the operations cannot all run.

    ``shared`` are the sets of stages whose parameters have gradients to be summed over ranks: (0,) stands for what
    stage 0 alone uses, (0, 3) for what the stages 0 and 3 share.

    When receives are posted, and sums begun, is told in ``common_order``.
    """
    downstream: dict[int, list[int]] = defaultdict(list)
    upstream: dict[int, list[int]] = defaultdict(list)
    for source, target in sorted({(t.source, t.target) for t in transfers}):
        downstream[source].append(target)
        upstream[target].append(source)
    with_gradient = {(transfer.source, transfer.target) for transfer in transfers if transfer.value.differentiable}

    def messages(operation: Operation) -> tuple[list[Message], list[Message]]:
        """What the operation receives and sends."""
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

    received: list[list[list[Message]]] = [[] for _ in schedule.operations]  # by device and step
    sent: list[list[list[Message]]] = [[] for _ in schedule.operations]
    walked: list[tuple[int, int]] = []  # when each step ends, and its device
    syncs = _Syncs(schedule, shared)
    ends = [0] * schedule.devices
    sent_at: dict[Message, int] = {}  # the end of the sender's step

    def run_next(device: int, index: int) -> bool:
        operation = schedule.operations[device][index]
        receives, sends = messages(operation)
        if any(message not in sent_at for message in receives) or not syncs.are_done_for(operation):
            return False
        begin = max([ends[device], syncs.end_for(operation), *map(sent_at.__getitem__, receives)])
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
    begun = beginnings(schedule, sent, common_order(walked, schedule.devices), shared)
    released = _releases([device for _, device in walked], received, sent, begun)
    programs = tuple(
        Program(
            steps=tuple(
                Step(operation, begins, tuple(receives), tuple(sends), tuple(releases))
                for operation, begins, receives, sends, releases in zip(
                    operations, begun[device], received[device], sent[device], released[device], strict=True
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
    begun: Sequence[Sequence[Sequence[Communication]]],
) -> list[list[list[Message]]]:
    """Per device and step, the messages sent earlier that it forgets.

    By a vector clock of each device: from the first step at which a chain of messages proves that the receiver has
    posted the message, so that the device waits for its transfer at most. Where nothing proves it, as long as messages
    go one way, the oldest is forgotten when SENT_AT_MOST would be exceeded: the device then waits for a receiver that
    is so far behind. ``walk`` has the devices of all steps, in an order in which they can run.
    """
    posted_before = {  # the receiver, and its step
        one: (device, number)
        for device, steps in enumerate(begun)
        for number, beginnings in enumerate(steps)
        for one in beginnings
        if isinstance(one, Message)
    }
    devices = len(sent)
    released: list[list[list[Message]]] = [[] for _ in range(devices)]
    clock = [[0] * devices for _ in range(devices)]  # [device][peer]: steps of peer known to be done
    sent_at: dict[Message, list[int]] = {}  # the sender's clock
    # [device][peer]: what it sent there, in order, each with the peer's step before which it is posted
    unreleased: list[dict[int, deque[tuple[int, Message]]]] = [defaultdict(deque) for _ in range(devices)]
    for device in walk:
        step = len(released[device])
        for message in received[device][step]:
            clock[device] = [max(pair) for pair in zip(clock[device], sent_at[message], strict=True)]
        clock[device][device] += 1
        released[device].append([])
        crossing = [message for message in sent[device][step] if message in posted_before]
        more = Counter(posted_before[message][0] for message in crossing)
        for peer, waiting in unreleased[device].items():
            while waiting and (waiting[0][0] < clock[device][peer] or len(waiting) + more[peer] > SENT_AT_MOST):
                released[device][step].append(waiting.popleft()[1])
        sent_at.update((message, list(clock[device])) for message in sent[device][step])
        for message in crossing:
            peer, before = posted_before[message]
            unreleased[device][peer].append((before, message))
    return released


class _Syncs:
    """Which syncs an update comes after.

    In a synchronous schedule it comes after all: its norm is that of all gradients. Else after those of the stages that
    share parameters with its own.
    """

    def __init__(self, schedule: Schedule, shared: Collection[tuple[int, ...]]) -> None:
        self._ends: dict[PipeStage, list[int]] = {replica: [] for replica in schedule.device_of}
        self._updates: Counter[PipeStage] = Counter()
        self._before: dict[int, list[PipeStage]] = {}
        for stage in range(schedule.stages):
            together = {stage}.union(*(stages for stages in shared if stage in stages))
            self._before[stage] = [
                replica for replica in self._ends if not schedule.weight_version or replica[0] in together
            ]

    def are_done_for(self, operation: Operation) -> bool:
        number = self._updates[operation.stage, operation.pipe]
        return operation.kind is not Kind.UPDATE or all(
            len(self._ends[replica]) > number for replica in self._before[operation.stage]
        )

    def end_for(self, operation: Operation) -> int:
        """When the last of them ends; 0 where ``operation`` is no update."""
        if operation.kind is not Kind.UPDATE:
            return 0
        number = self._updates[operation.stage, operation.pipe]
        return max(self._ends[replica][number] for replica in self._before[operation.stage])

    def note(self, operation: Operation, end: int) -> None:
        replica = operation.stage, operation.pipe
        if operation.kind is Kind.SYNC:
            self._ends[replica].append(end)
        elif operation.kind is Kind.UPDATE:
            self._updates[replica] += 1


def _versions(schedule: Schedule, device: int) -> dict[PipeStage, dict[int, int]]:
    versions: dict[PipeStage, dict[int, int]] = {own: {} for own, home in schedule.device_of.items() if home == device}
    for operation in schedule.operations[device]:
        if operation.kind is Kind.FORWARD:
            for m in operation.micro_batches:
                version = schedule.weight_version.get((operation.stage, m), 0)
                versions[operation.stage, operation.pipe][m] = version
    return versions
