"""The pattern under 1F1B and its relatives: run ahead by some forwards, then one forward and one backward in turn."""

from collections.abc import Sequence
from itertools import chain

from auto3d.schedule.operation import Kind, Operation


def alternate(
    forwards: Sequence[Operation], backwards: Sequence[Sequence[Operation]], ahead: int
) -> tuple[Operation, ...]:
    """``ahead`` forwards, then a forward and a backward in turn, then the backwards that are left.

    Each of ``backwards`` is what is done together: ``B``, or ``R B``, or ``I W``.
    """
    ahead = min(ahead, len(forwards))
    steady = [(forward, *backward) for forward, backward in zip(forwards[ahead:], backwards, strict=False)]
    return (*forwards[:ahead], *chain(*steady, *backwards[len(steady) :]))


def of_stage(kind: Kind, stage: int, micro_batches: int) -> list[Operation]:
    """Operations of one kind on ``stage``, one per micro-batch."""
    return [Operation(kind, stage, (m,)) for m in range(micro_batches)]
