"""The tensor-parallel collectives of emulated devices: real sums of zeros, or waits of a given time in lockstep."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from auto3d.conversions import Collective
from auto3d.cost.work import TensorExchange
from auto3d.runtime.emulated.device_clock import DeviceClock
from auto3d.runtime.messages.tensor_group import Pending, TensorGroup

PIECE_BYTES = 2**24  # largest buffer of one collective: all buffers of a large model would not fit in memory at once
_WHAT = "an emulated operation"

Wait = Callable[[], None]
"""Returns when a collective that has begun is done."""


class EmulatedCollectives(Protocol):
    """Runs the collectives of emulated stages."""

    def begin(self, exchange: TensorExchange, stage: int, share: float) -> Wait:
        """Begin ``exchange`` of stage ``stage``, of values of this ``share`` of a micro-batch."""


class RealCollectives:
    """Collectives of zeros of the true sizes, through ``group``. The device idles until they are done."""

    def __init__(self, group: TensorGroup, *, clock: DeviceClock) -> None:
        self._group = group
        self._clock = clock
        self._buffer = torch.zeros(PIECE_BYTES // 4)

    def begin(self, exchange: TensorExchange, stage: int, share: float) -> Wait:
        pieces = [self._begin(exchange.collective, piece) for piece in self._pieces(exchange.size)]

        def wait() -> None:
            with self._clock.needing():
                for piece in pieces:
                    piece()

        return wait

    def _pieces(self, size: float) -> Iterator[torch.Tensor]:
        """Buffers of ``size`` bytes together, rounded up so that each rank has an equal part of every buffer."""
        shards = self._group.shards
        remaining = max(1, -(-int(size) // 4 // shards)) * shards
        largest = len(self._buffer) // shards * shards
        while remaining:
            piece = self._buffer[: min(remaining, largest)]
            remaining -= len(piece)
            yield piece

    def _begin(self, collective: Collective, whole: torch.Tensor) -> Pending:
        if collective is Collective.ALL_REDUCE:
            return self._group.all_reduce(whole, _WHAT)
        parts = whole.view(self._group.shards, -1)
        if collective is Collective.ALL_GATHER:
            return self._group.all_gather(parts[0], _WHAT)
        return self._group.reduce_scatter(parts, _WHAT)


class GivenCollectives:
    """Collectives of ``seconds``, by stage, one after the other on a link that the ranks of ``group`` share.

    A collective starts when the last rank has begun it and the collective before it is done. The ranks tell each other
    when they began, so all of them end it at the same time.
    """

    def __init__(self, group: TensorGroup, seconds: Sequence[float], *, clock: DeviceClock) -> None:
        self._group = group
        self._seconds = seconds
        self._clock = clock
        self._free = 0.0  # time at which the link is free

    def begin(self, exchange: TensorExchange, stage: int, share: float) -> Wait:
        begun = self._largest(self._clock.free)

        def wait() -> None:
            self._free = max(self._free, begun()) + share * self._seconds[stage]
            self._clock.until(self._free)

        return wait

    def _largest(self, value: float) -> Callable[[], float]:
        """The largest ``value`` of all ranks, once they have sent it."""
        pending = self._group.all_reduce(torch.tensor([value], dtype=torch.float64), _WHAT, maximum=True)
        return lambda: float(pending())
