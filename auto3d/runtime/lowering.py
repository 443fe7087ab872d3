"""Operations -> programs: a schedule's operations with the messages that each receives, sends and may forget.

Schedules do not write sends and receives; this pass derives them from the values that cross stages.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from auto3d.partition.stage import Transfer
from auto3d.schedule.check import ScheduleError
from auto3d.schedule.operation import Kind, Operation, Schedule

Replica = tuple[int, int]  # (stage, pipe)


@dataclass(frozen=True, slots=True)
class Message:
    """What one micro-batch brings from stage ``source`` to stage ``target``: activations (F) or their gradients (B)."""

    kind: Kind
    source: int
    target: int
    micro_batch: int
    pipe: int = 0

    def __str__(self) -> str:
        what = "activations" if self.kind is Kind.FORWARD else "gradients"
        user = Operation(self.kind, self.target, (self.micro_batch,), self.pipe)
        return f"{what} for {user} from stage {self.source}"


@dataclass(frozen=True, slots=True)
class Step:
    """One operation with its messages; those in ``releases`` were sent earlier and are known to have been consumed."""

    operation: Operation
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    releases: tuple[Message, ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What one pipeline device does in an iteration or, if they overlap, in several."""

    steps: tuple[Step, ...]
    arrivals: dict[int, tuple[Message, ...]]  # peer device -> its messages to this device, in the order it sends them
    versions: dict[Replica, dict[int, int]] = field(default_factory=dict)
    """Of each own stage: micro-batch -> how many of the program's updates its forward and backward see."""
    iterations: int = 1
    updates: int = 1  # of each stage in an iteration
    asynchronous: bool = False  # a stage is updated by itself, not after the backwards of all


def lower(schedule: Schedule, transfers: Sequence[Transfer]) -> tuple[Program, ...]:
    """The program of each pipeline device; raises ScheduleError if the operations cannot all run.

    Walks the operations in an order in which they can run, with a vector clock per device: a send may be forgotten
    from the first step at which a chain of messages proves that its receiver has consumed it. So no device ever waits
    for a send, and none holds a tensor longer than it must.
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

    consumed_at = {
        message: index
        for operations in schedule.operations
        for index, operation in enumerate(operations)
        for message in messages(operation)[0]
    }
    steps: list[list[Step]] = [[] for _ in schedule.operations]
    arrivals: list[dict[int, list[Message]]] = [defaultdict(list) for _ in schedule.operations]
    clock = [[0] * schedule.devices for _ in schedule.operations]  # [device][peer]: steps of peer known to be done
    sent_at: dict[Message, list[int]] = {}  # the sender's clock
    unreleased: list[list[Message]] = [[] for _ in schedule.operations]

    def advance(device: int) -> bool:
        operation = schedule.operations[device][len(steps[device])]
        receives, sends = messages(operation)
        if any(message not in sent_at for message in receives):
            return False
        for message in receives:
            clock[device] = [max(pair) for pair in zip(clock[device], sent_at[message], strict=True)]
        clock[device][device] += 1
        releases = [
            m for m in unreleased[device] if clock[device][schedule.device_of[m.target, m.pipe]] > consumed_at[m]
        ]
        unreleased[device] = [m for m in unreleased[device] if m not in releases]
        for message in sends:
            sent_at[message] = list(clock[device])
            peer = schedule.device_of[message.target, message.pipe]
            if peer != device:
                arrivals[peer][device].append(message)
                unreleased[device].append(message)
        steps[device].append(Step(operation, tuple(receives), tuple(sends), tuple(releases)))
        return True

    pending = set(range(schedule.devices))
    while pending:
        moved = False
        for device in sorted(pending):
            while len(steps[device]) < len(schedule.operations[device]) and advance(device):
                moved = True
            if len(steps[device]) == len(schedule.operations[device]):
                pending.discard(device)
        if pending and not moved:
            stuck = ", ".join(f"device {d} at {schedule.operations[d][len(steps[d])]}" for d in sorted(pending))
            raise ScheduleError(f"deadlock: {stuck}")
    return tuple(
        Program(
            steps=tuple(own),
            arrivals={peer: tuple(order) for peer, order in arrived.items()},
            versions=_versions(schedule, device),
            iterations=schedule.iterations,
            updates=schedule.updates,
            asynchronous=bool(schedule.weight_version),
        )
        for device, (own, arrived) in enumerate(zip(steps, arrivals, strict=True))
    )


def _versions(schedule: Schedule, device: int) -> dict[Replica, dict[int, int]]:
    versions: dict[Replica, dict[int, int]] = {own: {} for own, home in schedule.device_of.items() if home == device}
    for operation in schedule.operations[device]:
        if operation.kind is Kind.FORWARD:
            for m in operation.micro_batches:
                version = schedule.weight_version.get((operation.stage, m), 0)
                versions[operation.stage, operation.pipe][m] = version
    return versions
