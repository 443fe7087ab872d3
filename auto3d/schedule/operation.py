"""Operations, and the Schedule that lists them per pipeline device.

Text form: ``F3@1`` is the forward of micro-batch 3 on stage 1; ``F0+1@2:1`` is one forward of the micro-batches 0 and 1
on stage 2 of pipe 1; ``S@1`` starts the gradient sync of stage 1; ``U@1`` updates its weights.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from auto3d.errors import InputError


class Kind(StrEnum):
    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SYNC = "S"
    UPDATE = "U"

    __hash__ = str.__hash__  # an enum's own is Python code, and schedules hash millions of operations


BACKWARDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})


class Operation(NamedTuple):
    kind: Kind
    stage: int
    micro_batches: tuple[int, ...] = ()
    pipe: int = 0

    def __str__(self) -> str:
        pipe = f":{self.pipe}" if self.pipe else ""
        return f"{self.kind}{'+'.join(map(str, self.micro_batches))}@{self.stage}{pipe}"


def singles(kind: Kind, stage: int, micro_batches: int, pipe: int = 0) -> Sequence[Operation]:
    """The operations on the micro-batches 0, 1, …, one on each: at least ``micro_batches`` of them.

    They are made once for all schedules.
    """
    known = _singles(kind, stage, pipe)
    known += [Operation(kind, stage, (m,), pipe) for m in range(len(known), micro_batches)]
    return known


@lru_cache(2**10)
def _singles(kind: Kind, stage: int, pipe: int) -> list[Operation]:
    return []


_TEXT = re.compile(r"([FRBIWSU])((?:\d+(?:\+\d+)*)?)@(\d+)(?::(\d+))?")


def parse(text: str) -> Operation:
    """The operation with this text form. Raises InputError if there is none."""
    match = _TEXT.fullmatch(text)
    if match is None or bool(match[2]) == (match[1] in "SU"):
        raise InputError(f"{text!r} is not an operation; write F3@1, F0+1@2:1, S@1 or U@1")
    micro_batches = tuple(int(number) for number in match[2].split("+")) if match[2] else ()
    return Operation(Kind(match[1]), int(match[3]), micro_batches, int(match[4] or 0))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The operations of ``iterations`` iterations: one list per pipeline device, which runs them in that order."""

    name: str
    stages: int
    micro_batches: int  # per iteration; operations number them consecutively through all iterations
    device_of: dict[tuple[int, int], int]  # (stage, pipe) -> pipeline device
    operations: tuple[tuple[Operation, ...], ...]  # per pipeline device
    recompute: frozenset[int] = frozenset()  # stages that keep only their inputs and run their forward again
    parts: int = 1  # the parts of a micro-batch; operations number parts: 2 if Chimera halves the backward
    slices: int = 1
    """Above 1 if the parts of a micro-batch are slices of its sequence, not of its samples; equal to ``parts`` then."""
    iterations: int = 1  # above 1 only if an iteration begins before the previous iteration has updated the weights
    weight_version: dict[tuple[int, int], int] = field(default_factory=dict)
    """(stage, micro-batch) -> the number of updates that the weights of its forward and backward have had.

    Empty in a synchronous schedule, where all operations of an iteration use the newest weights.
    """

    held_ahead: int = 1  # messages from one stage that a device receives before it has used the first of them
    forward_only: bool = False  # it evaluates: it has forwards and nothing else

    def __hash__(self) -> int:
        """A hash of the sizes alone: a schedule has up to a million operations, and caches have it as a key."""
        return hash((self.name, self.stages, self.micro_batches, self.devices, self.parts, self.iterations))

    @property
    def devices(self) -> int:
        return len(self.operations)

    @property
    def sample_parts(self) -> int:
        """The parts into which the samples of a micro-batch are divided."""
        return self.parts // self.slices

    @property
    def updates(self) -> int:
        """The updates of each stage per iteration: more than one if an update takes only some of the micro-batches."""
        if self.forward_only:
            return 0
        update = next(operation for operation in self.operations[0] if operation.kind is Kind.UPDATE)
        return self.operations[0].count(update) // self.iterations
