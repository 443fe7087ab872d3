"""Emulated devices: all is real but the arithmetic; in its place an operation waits for as long as it is told.

Processes, schedule, executor, messages and gradient syncs are those of real training, and have their true sizes. No
weight is made, no data is loaded, nothing is computed, and so there is no loss. It lets a few cores run as many devices
as they can carry the messages of.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import nan
from resource import RUSAGE_THREAD, getrusage
from typing import Any

import torch
from torch import nn

from auto3d.capture.graph import Value
from auto3d.partition.stage import Stage
from auto3d.runtime.exchange import Exchange
from auto3d.runtime.gradient_sync import GradientSync, Holders, Share
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.weight_versions import WeightVersions
from auto3d.schedule.operation import Kind
from auto3d.schedule.program import Message
from auto3d.simulate.costs import Costs

PIECE_BYTES = 2**24  # of an all-reduce at a time: the gradients of a large model would not fit here


class DeviceClock:
    """When the emulated device of this rank is free.

    An operation starts when the device is free and its inputs are there, and not later because this process was still
    busy with sending: as on a device that is given its operations ahead.
    """

    def __init__(self) -> None:
        self.free = time.perf_counter()

    def idle(self) -> None:
        """The device had nothing to do until now."""
        self.free = max(self.free, time.perf_counter())

    @contextmanager
    def needing(self) -> Iterator[None]:
        """Inside, this process waits for what the next operation needs; if it was there already, no time was lost."""
        before = _times_slept()
        yield
        if _times_slept() > before:
            self.idle()

    def work(self, seconds: float) -> None:
        """Return when an operation of so many seconds is done."""
        self.free += seconds
        time.sleep(max(0.0, self.free - time.perf_counter()))


def _times_slept() -> int:
    """How often this thread had to wait for something; gloo does not tell whether a message has arrived."""
    return getrusage(RUSAGE_THREAD).ru_nvcsw


class EmulatedStage:
    """In the place of a StageModule. What it returns has true sizes, and is allocated once."""

    def __init__(
        self, stage: Stage, costs: Costs, *, parts: int, recompute: bool, clock: DeviceClock, device: torch.device
    ) -> None:
        self.stage = stage
        self.losses: dict[int, torch.Tensor] = {}  # not numbers
        self.weights = WeightVersions({}, several=False)
        self._seconds = {kind: costs.times_of(kind)[stage.index] / parts for kind in Kind}
        self._recompute = recompute
        self._recomputed: set[int] = set()  # micro-batches before their backward
        self._clock = clock
        self._sent = _empty((transfer.value for transfer in stage.sent), device)
        self._sent_back = _empty((t.value for t in stage.received if t.value.differentiable), device)

    def forward(
        self, micro_batch: int, received: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        self._work(Kind.FORWARD)
        self.losses[micro_batch] = torch.tensor(nan)
        return self._sent

    def recompute(self, micro_batch: int) -> None:
        self._work(Kind.RECOMPUTE)
        self._recomputed.add(micro_batch)

    def backward(self, micro_batch: int, gradients: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
        return self._back(Kind.BACKWARD, micro_batch)

    def backward_input(
        self, micro_batch: int, gradients: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        return self._back(Kind.BACKWARD_INPUT, micro_batch)

    def backward_weight(self, micro_batch: int) -> None:
        self._work(Kind.BACKWARD_WEIGHT)

    def _back(self, kind: Kind, micro_batch: int) -> dict[str, torch.Tensor]:
        if self._recompute and micro_batch not in self._recomputed:
            self.recompute(micro_batch)
        self._recomputed.discard(micro_batch)
        self._work(kind)
        return self._sent_back

    def _work(self, kind: Kind) -> None:
        self._clock.work(self._seconds[kind])


def _empty(values: Iterable[Value], device: torch.device) -> dict[str, torch.Tensor]:
    return {value.name: torch.zeros(value.shape, dtype=getattr(torch, value.dtype), device=device) for value in values}


class EmulatedExchange(Exchange):
    """Real messages, for whose arrival the device's clock waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clock = DeviceClock()

    def start(self) -> None:
        self.clock.idle()
        super().start()

    def receive(self, message: Message) -> dict[str, torch.Tensor]:
        with self.clock.needing():
            return super().receive(message)


class EmulatedSync(GradientSync):
    """Real all-reduces of zeros, as many bytes as the gradients have, over one piece of memory.

    ``trained`` are the parameters of this rank's stages, each of which is stood for by one number.
    """

    def __init__(
        self,
        trained: Mapping[str, Value],
        holders: Mapping[str, Holders],
        *,
        sync_bytes: Sequence[float] | None,
        clock: DeviceClock,
        device: torch.device,
        run_ahead: RunAhead,
        timeout_s: float,
    ) -> None:
        self._trained = trained
        self._sync_bytes = sync_bytes
        self._clock = clock
        numbers = {n: nn.Parameter(torch.zeros((), dtype=getattr(torch, v.dtype))) for n, v in trained.items()}
        super().__init__(numbers, holders, device=device, run_ahead=run_ahead, timeout_s=timeout_s)
        self._piece = torch.zeros(PIECE_BYTES // 4)

    def wait(self, stages: Collection[int]) -> None:
        with self._clock.needing():
            super().wait(stages)

    def squared_norm(self) -> float:
        return nan

    def _pieces(self, share: Share) -> list[torch.Tensor]:
        holders, _ = share
        if self._sync_bytes is None:
            size = sum(self._trained[name].bytes for name in self._names[share])
        else:
            size = max(self._sync_bytes[stage] for stage in holders.stages)
        whole, rest = divmod(max(1, int(size) // 4), len(self._piece))
        return [*[self._piece] * whole, *([self._piece[:rest]] if rest else [])]
