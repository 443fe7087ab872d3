"""Operations, the words that a schedule is written in, and the Schedule itself.

Text form: ``F3@1`` is the forward of micro-batch 3 on stage 1; ``F0+1@2:1`` a forward of two micro-batches on stage 2
of model replica (pipe) 1; ``S@1`` and ``U@1`` start the gradient sync and update the weights of stage 1.
"""

import re
from dataclasses import dataclass, field
from enum import StrEnum

from auto3d.errors import InputError


class Kind(StrEnum):
    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SYNC = "S"
    UPDATE = "U"


BACKWARDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})


@dataclass(frozen=True, slots=True)
class Operation:
    kind: Kind
    stage: int
    micro_batches: tuple[int, ...] = ()
    pipe: int = 0

    def __str__(self) -> str:
        pipe = f":{self.pipe}" if self.pipe else ""
        return f"{self.kind}{'+'.join(map(str, self.micro_batches))}@{self.stage}{pipe}"


_TEXT = re.compile(r"([FRBIWSU])((?:\d+(?:\+\d+)*)?)@(\d+)(?::(\d+))?")


def parse(text: str) -> Operation:
    """The operation that ``text`` names; raises InputError where it names none."""
    match = _TEXT.fullmatch(text)
    if match is None or bool(match[2]) == (match[1] in "SU"):
        raise InputError(f"{text!r} is not an operation; write F3@1, F0+1@2:1, S@1 or U@1")
    micro_batches = tuple(int(number) for number in match[2].split("+")) if match[2] else ()
    return Operation(Kind(match[1]), int(match[3]), micro_batches, int(match[4] or 0))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The operations of ``iterations`` iterations, one list per pipeline device, each run in its order."""

    name: str
    stages: int
    micro_batches: int  # per iteration; operations number them on through the iterations
    device_of: dict[tuple[int, int], int]  # (stage, pipe) -> pipeline device
    operations: tuple[tuple[Operation, ...], ...]  # per pipeline device
    recompute: frozenset[int] = frozenset()  # stages that keep only their inputs, and run their forward again
    parts: int = 1  # that each micro-batch is run in, numbered one by one: 2 where Chimera halves the backward
    iterations: int = 1  # more than one only where an iteration begins before the one before it is updated
    weight_version: dict[tuple[int, int], int] = field(default_factory=dict)
    """(stage, micro-batch) -> how many updates of the stage its forward and backward see; empty: the last one's."""

    @property
    def devices(self) -> int:
        return len(self.operations)

    @property
    def updates(self) -> int:
        """Updates of each stage in an iteration: more than one where each is for a part of its micro-batches."""
        update = next(operation for operation in self.operations[0] if operation.kind is Kind.UPDATE)
        return self.operations[0].count(update) // self.iterations
