"""The share of a micro-batch's work that one operation of one rank does."""

from dataclasses import dataclass

from auto3d.plan import Plan
from auto3d.schedule.shape import shape_of


@dataclass(frozen=True, kw_only=True)
class Share:
    """A tensor-parallel shard of the work of all tokens, or all the work of one slice of the sequence."""

    tp: int = 1  # tensor-parallel degree
    sequence_parallel: bool = False
    slices: int = 1
    slice_number: int = 0


WHOLE = Share()


def share_of(plan: Plan) -> Share:
    """The share of one rank of ``plan`` in all tokens of a micro-batch."""
    return Share(tp=plan.tp, sequence_parallel=plan.sequence_parallel)


def shares_of(plan: Plan) -> tuple[Share, ...]:
    """The shares of the operations that run a micro-batch on one rank of ``plan``: one for each slice, in order."""
    slices = shape_of(plan).slices
    if slices == 1:
        return (share_of(plan),)
    return tuple(Share(slices=slices, slice_number=number) for number in range(slices))
