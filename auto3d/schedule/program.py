"""The program of a pipeline device: steps, each an operation with its messages and its sums over ranks."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from auto3d.schedule.operation import Kind, Operation

PipeStage = tuple[int, int]  # (stage, pipe): a stage as it stands on one pipe


class Message(NamedTuple):
    """What stage ``source`` sends stage ``target`` for one micro-batch: activations (kind F) or their gradients (B).

    A NamedTuple, since the executor looks messages up in every step, and the hash of a dataclass is Python code.
    """

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
class GradientSum:
    """The sum, over all their holders, of the gradients of the parameters that exactly these ``stages`` use."""

    stages: tuple[int, ...]
    update: int = 0  # the number of the stages' update that uses the sum, counted through the program

    def __str__(self) -> str:
        return f"the sum of gradients of stage {' and '.join(map(str, self.stages))}"


@dataclass(frozen=True, slots=True)
class LossSum:
    """The sum of the losses of one iteration over all ranks, in programs whose iterations overlap."""

    iteration: int  # counted from the program's first

    def __str__(self) -> str:
        return f"the sum of losses of iteration {self.iteration}"


Communication = Message | GradientSum | LossSum


@dataclass(frozen=True, slots=True)
class Step:
    """One operation with its messages."""

    operation: Operation
    begins: tuple[Communication, ...]  # receives to post and sums to start before the operation, in this order
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    releases: tuple[Message, ...]  # messages sent by earlier steps that need no longer be kept in memory

    @property
    def posts(self) -> tuple[Message, ...]:
        """The messages whose receives are posted before the operation."""
        return tuple(communication for communication in self.begins if isinstance(communication, Message))


@dataclass(frozen=True, kw_only=True)
class Program:
    """The steps of one pipeline device in one iteration or, if iterations overlap, in several."""

    steps: tuple[Step, ...]
    versions: dict[PipeStage, dict[int, int]] = field(default_factory=dict)
    """Per stage of the device: micro-batch -> how many of the program's updates its forward and backward see."""
    iterations: int = 1
    updates: int = 1  # updates of each stage per iteration
    asynchronous: bool = False  # each stage is updated separately, not after the backwards of all stages


def without(program: Program, absent: Collection[int]) -> Program:
    """``program`` without what it runs, sends and receives of the micro-batches ``absent``.

    What stands before a step that falls away stands before the next step, so that all ranks of a pipeline that leave
    out the same micro-batches keep the order of all else.
    """

    def kept(messages: Iterable[Message]) -> tuple[Message, ...]:
        return tuple(message for message in messages if message.micro_batch not in absent)

    steps: list[Step] = []
    begins: list[Communication] = []
    releases: list[Message] = []
    for step in program.steps:
        begins += [
            communication
            for communication in step.begins
            if not isinstance(communication, Message) or communication.micro_batch not in absent
        ]
        releases += kept(step.releases)
        numbers = tuple(m for m in step.operation.micro_batches if m not in absent)
        if not numbers and step.operation.micro_batches:
            continue
        operation = step.operation._replace(micro_batches=numbers)
        steps.append(Step(operation, tuple(begins), kept(step.receives), kept(step.sends), tuple(releases)))
        begins, releases = [], []
    assert not begins, "updates come last"
    versions = {
        pipe_stage: {m: version for m, version in of_stage.items() if m not in absent}
        for pipe_stage, of_stage in program.versions.items()
    }
    return replace(program, steps=tuple(steps), versions=versions)
