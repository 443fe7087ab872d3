"""The messages and gradient sums of emulated devices: real sums of zeros, or waits of a given time."""

from collections.abc import Collection, Mapping, Sequence
from math import nan
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from auto3d.capture.graph import Value
from auto3d.runtime.emulated.collectives import PIECE_BYTES
from auto3d.runtime.emulated.device_clock import DeviceClock
from auto3d.runtime.messages.exchange import Exchange
from auto3d.runtime.messages.gradient_sync import Bucket, GradientSync, Holders, sum_of
from auto3d.runtime.messages.slice_collectives import Begun
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.waiting import waiting_for
from auto3d.schedule.program import Message


class EmulatedExchange(Exchange):
    """Real messages. The clock of the emulated device waits for their arrival."""

    def __init__(self, *args: Any, clock: DeviceClock, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clock = clock

    def start(self) -> None:
        self._clock.idle()
        super().start()

    def receive(self, message: Message) -> dict[str, torch.Tensor]:
        with self._clock.needing():
            return super().receive(message)


class GivenExchange(EmulatedExchange):
    """Messages of ``seconds``, by the first of their two stages, one after the other between two devices.

    A message leaves at the end of its operation, once the message before it has arrived. It carries when it arrives.
    The pieces of one message between several replicas travel together.
    """

    def __init__(self, *args: Any, seconds: Sequence[float], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = seconds
        self._free: dict[int, float] = {}  # receiving device -> time at which the link to it is free

    def send(self, message: Message, tensors: list[torch.Tensor]) -> None:
        if not self._is_local(message):
            to = self._device_of[message.target, message.pipe]
            leaves = max(self._clock.free, self._free.get(to, 0.0))
            self._free[to] = leaves + self._seconds[min(message.source, message.target)]
            tensors = [torch.full_like(tensor, self._free[to]) for tensor in tensors]
        super().send(message, tensors)

    def receive(self, message: Message) -> dict[str, torch.Tensor]:
        received = super().receive(message)
        if not self._is_local(message):
            (arrival,) = received.values()
            with self._run_ahead.waiting():
                self._clock.until(float(arrival.max()))
        return received


class EmulatedSync(GradientSync):
    """Real sums and gathers of zeros, as many bytes as the gradients have, over one buffer that all of them share.

    ``trained`` has the shapes of the parameters of this rank's stages; a number stands in for each parameter.
    ``sync_bytes`` replaces the true sizes by a size for each stage.
    """

    def __init__(
        self,
        trained: Mapping[str, Value],
        holders: Mapping[str, Holders],
        *,
        all_holders: Collection[Holders],
        sync_bytes: Sequence[float] | None,
        clock: DeviceClock,
        device: torch.device,
        run_ahead: RunAhead,
    ) -> None:
        self._trained = trained
        self._sync_bytes = sync_bytes
        self._clock = clock
        stand_ins = {n: nn.Parameter(torch.zeros((), dtype=getattr(torch, v.dtype))) for n, v in trained.items()}
        super().__init__(
            stand_ins,
            holders,
            all_holders=all_holders,
            device=device,
            run_ahead=run_ahead,
        )
        self._piece = torch.zeros(PIECE_BYTES // 4)

    def _wait(self, begun: Begun, what: str) -> None:
        with self._clock.needing():
            super()._wait(begun, what)

    def squared_norm(self) -> float:
        return nan

    def _weight_pieces(self, bucket: Bucket) -> list[torch.Tensor]:
        return self._pieces(bucket)

    def _pieces(self, bucket: Bucket) -> list[torch.Tensor]:
        size: float
        if self._sync_bytes is None:
            size = sum(self._trained[name].bytes for name in self._names[bucket])
        else:
            size = max(self._sync_bytes[stage] for stage in bucket[0].stages)
        ranks = len(bucket[0].ranks) if bucket[0].is_split else 1  # each rank has an equal slice of every piece
        piece = self._piece[: len(self._piece) // ranks * ranks]
        whole, rest = divmod(-(-max(1, int(size) // 4) // ranks) * ranks, len(piece))
        return [*[piece] * whole, *([piece[:rest]] if rest else [])]


class GivenSync(EmulatedSync):
    """Gradient sums of ``seconds``, by stage, one after the other on each device; the gathers of ZeRO-1 take none.

    A sum ends on all its ranks when it would end on the last of them. The ranks tell each other when that is. The sum
    of a weight that several stages share takes no time.
    """

    def __init__(self, *args: Any, seconds: Sequence[float], clock: DeviceClock, **kwargs: Any) -> None:
        super().__init__(*args, sync_bytes=(0.0,) * len(seconds), clock=clock, **kwargs)
        self._seconds = seconds
        self._free = 0.0  # time at which this device's sums so far are over, as far as it knows
        self._ends: dict[Begun, torch.Tensor] = {}

    def begin(self, stages: Sequence[int]) -> None:
        self._free = max(self._free, self._clock.free) + (self._seconds[stages[0]] if len(stages) == 1 else 0.0)
        for holders, group in self._groups.items():
            if holders.stages == tuple(stages) and dist.get_rank() in holders.ranks:
                end = torch.tensor([self._free], dtype=torch.float64)
                with waiting_for(sum_of(holders)):
                    work = dist.all_reduce(end, op=dist.ReduceOp.MAX, group=group, async_op=True)
                assert work is not None
                begun = Begun([work])
                self._ends[begun] = end
                self._sums.append((begun, holders))

    def _wait(self, begun: Begun, what: str) -> None:
        super()._wait(begun, what)
        if begun in self._ends:
            self._clock.until(float(self._ends.pop(begun)))
