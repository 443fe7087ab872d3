"""The share of a micro-batch's work that one operation of one rank does."""

from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, kw_only=True, order=True)
class Share:
    """A tensor-parallel shard of the work of all tokens, or of one slice of the sequence."""

    tp: int = 1  # tensor-parallel degree
    sequence_parallel: bool = False
    slices: int = 1
    slice_number: int = 0

    @property
    def of_any_slice(self) -> "Share":
        """The share, whichever slice it is of."""
        return replace(self, slice_number=0)

    @property
    def of_all_shards(self) -> "Share":
        """The share of all ranks of a tensor-parallel group together."""
        return replace(self, tp=1, sequence_parallel=False)

    @property
    def of_all_tokens(self) -> "Share":
        """The share of a rank in all slices together."""
        return replace(self, slices=1, slice_number=0)


WHOLE = Share()


class TensorChoices(Protocol):
    """A Plan, or a candidate for one."""

    @property
    def tp(self) -> int: ...

    @property
    def sequence_parallel(self) -> bool: ...


def share_of(plan: TensorChoices) -> Share:
    """The share of one rank of ``plan`` in all tokens of a micro-batch."""
    return Share(tp=plan.tp, sequence_parallel=plan.sequence_parallel and plan.tp > 1)
