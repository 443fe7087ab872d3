"""What a rank runs: steps, each an operation with the messages and the sums over ranks that go with it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from auto3d.schedule.operation import Kind, Operation

PipeStage = tuple[int, int]  # (stage, pipe)


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
class GradientSum:
    """Of the gradients of the parameters that exactly these ``stages`` use, over all ranks that hold them."""

    stages: tuple[int, ...]
    update: int = 0  # the stages' update that uses it, counted through the program

    def __str__(self) -> str:
        return f"the sum of gradients of stage {' and '.join(map(str, self.stages))}"


@dataclass(frozen=True, slots=True)
class LossSum:
    """Of the losses of one iteration over all ranks, where the iterations of a program overlap."""

    iteration: int  # counted from the program's first

    def __str__(self) -> str:
        return f"the sum of losses of iteration {self.iteration}"


Communication = Message | GradientSum | LossSum


@dataclass(frozen=True, slots=True)
class Step:
    """One operation with its messages; those in ``releases`` were sent earlier, and are known to have been posted."""

    operation: Operation
    begins: tuple[Communication, ...]  # before the operation, in this order: receives that are posted, and sums
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    releases: tuple[Message, ...]

    @property
    def posts(self) -> tuple[Message, ...]:
        """The messages whose receives are posted before the operation."""
        return tuple(one for one in self.begins if isinstance(one, Message))


@dataclass(frozen=True, kw_only=True)
class Program:
    """What one pipeline device does in an iteration or, if they overlap, in several."""

    steps: tuple[Step, ...]
    versions: dict[PipeStage, dict[int, int]] = field(default_factory=dict)
    """Of each own stage: micro-batch -> how many of the program's updates its forward and backward see."""
    iterations: int = 1
    updates: int = 1  # how often an iteration updates each stage
    asynchronous: bool = False  # a stage is updated by itself, not after the backwards of all


def messages_in_memory(
    program: Program, device_of: Mapping[PipeStage, int]
) -> Iterator[tuple[set[Message], set[Message]]]:
    """Per step, the messages to and from other devices that are in memory at its fullest: those posted, and those sent.

    A step posts before it releases what earlier ones sent. The sets are the same objects at each step.
    """
    posted: set[Message] = set()
    sent: set[Message] = set()
    for step in program.steps:
        posted.update(step.posts)
        sent.update(m for m in step.sends if device_of[m.source, m.pipe] != device_of[m.target, m.pipe])
        yield posted, sent
        sent.difference_update(step.releases)
        posted.difference_update(step.receives)
