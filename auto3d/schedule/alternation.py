"""The pattern of 1F1B and its relatives: a warm-up of forwards, then one forward and one backward in turn."""

from collections.abc import Sequence
from itertools import chain

from auto3d.schedule.operation import Kind, Operation, singles


def alternate(
    forwards: Sequence[Operation], backwards: Sequence[Sequence[Operation]], ahead: int
) -> tuple[Operation, ...]:
    """``ahead`` forwards, then one forward and one backward in turn, then the remaining backwards.

    Each item of ``backwards`` is a group of operations that stay together: ``B``, ``R B`` or ``I W``.
    """
    ahead = min(ahead, len(forwards))
    steady = [(forward, *backward) for forward, backward in zip(forwards[ahead:], backwards, strict=False)]
    return (*forwards[:ahead], *chain(*steady, *backwards[len(steady) :]))


def of_stage(kind: Kind, stage: int, micro_batches: int) -> Sequence[Operation]:
    """The operations of one kind on ``stage``: one per micro-batch, in order."""
    return singles(kind, stage, micro_batches)[:micro_batches]
