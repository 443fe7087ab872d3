"""Emulated devices: everything is real except the arithmetic, in whose place an operation waits for its given time.

Processes, schedule, executor, messages, tensor-parallel collectives and gradient sums are those of real training and
have their true sizes. No weights are made, no data is loaded and nothing is computed, so there is no loss. A few cores
can therefore run as many devices as they can carry messages for.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any

import torch
from torch import nn

from auto3d.capture.graph import Value
from auto3d.partition.stage import Stage, cut
from auto3d.runtime.device_clock import DeviceClock
from auto3d.runtime.emulated_collectives import (
    PIECE_BYTES,
    EmulatedCollectives,
    GivenCollectives,
    RealCollectives,
    Wait,
)
from auto3d.runtime.emulated_passes import Passes, passes_of
from auto3d.runtime.emulation import Emulation
from auto3d.runtime.exchange import Exchange
from auto3d.runtime.gradient_sync import Bucket, GradientSync, Holders
from auto3d.runtime.layout import RankLayout
from auto3d.runtime.out_of_memory import MemoryWatch
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.stage import RunnableStage
from auto3d.runtime.tensor_group import TensorGroup
from auto3d.runtime.weight_versions import WeightVersions
from auto3d.schedule.operation import Kind
from auto3d.schedule.program import Message, PipeStage, Program


class EmulatedStage:
    """Stands in for a StageModule. The tensors it returns have their true sizes and are allocated once.

    ``passes`` has what each kind of operation does; ``collectives`` runs its collectives, if it has any.
    """

    def __init__(
        self,
        stage: Stage,
        passes: Passes,
        *,
        recompute: bool,
        clock: DeviceClock,
        device: torch.device,
        collectives: EmulatedCollectives | None = None,
    ) -> None:
        self.stage = stage
        self.losses: dict[int, torch.Tensor] = {}  # NaN: nothing is computed
        self.counts: dict[int, dict[int, torch.Tensor]] = {}
        self.weights = WeightVersions({}, several=False)
        self._passes = passes
        self._collectives = collectives
        self._recompute = recompute
        self._recomputed: set[int] = set()  # recomputed micro-batches whose backward has not run
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
        pending: dict[int, Wait] = {}
        for number, step in enumerate(self._passes[kind]):
            for earlier in step.waits:
                pending.pop(earlier)()
            self._clock.work(step.seconds)
            if step.collective is not None:
                assert self._collectives is not None
                pending[number] = self._collectives.begin(step.collective, self.stage.index, step.share)
        for wait in pending.values():
            wait()


def _empty(values: Iterable[Value], device: torch.device) -> dict[str, torch.Tensor]:
    return {value.name: torch.zeros(value.shape, dtype=getattr(torch, value.dtype), device=device) for value in values}


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


class EmulatedSync(GradientSync):
    """Real all-reduces of zeros, as many bytes as the gradients have, over one buffer that all of them share.

    ``trained`` has the shapes of the parameters of this rank's stages; one number stands in for each of them.
    ``sync_bytes`` replaces the true sizes by one for each stage.
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
        timeout_s: float,
    ) -> None:
        self._trained = trained
        self._sync_bytes = sync_bytes
        self._clock = clock
        stand_ins = {n: nn.Parameter(torch.zeros((), dtype=getattr(torch, v.dtype))) for n, v in trained.items()}
        super().__init__(
            stand_ins, holders, all_holders=all_holders, device=device, run_ahead=run_ahead, timeout_s=timeout_s
        )
        self._piece = torch.zeros(PIECE_BYTES // 4)

    def wait(self, stages: Collection[int]) -> None:
        with self._clock.needing():
            super().wait(stages)

    def squared_norm(self) -> float:
        return nan

    def _pieces(self, bucket: Bucket) -> list[torch.Tensor]:
        size: float
        if self._sync_bytes is None:
            size = sum(self._trained[name].bytes for name in self._names[bucket])
        else:
            size = max(self._sync_bytes[stage] for stage in bucket[0].stages)
        whole, rest = divmod(max(1, int(size) // 4), len(self._piece))
        return [*[self._piece] * whole, *([self._piece[:rest]] if rest else [])]


@dataclass(frozen=True, kw_only=True)
class EmulatedBackend:
    """A Backend for emulated devices: operations only wait, for the times in ``emulation``."""

    emulation: Emulation
    device: torch.device
    run_ahead: RunAhead
    timeout_s: float
    clock: DeviceClock = field(default_factory=lambda: DeviceClock())

    def exchange(self, layout: RankLayout, program: Program) -> EmulatedExchange:
        return EmulatedExchange(
            program,
            layout.transfers,
            ranks_of=layout.peers,
            device_of=layout.schedule.device_of,
            sample_dimensions=layout.sample_dimensions,
            device=self.device,
            run_ahead=self.run_ahead,
            timeout_s=self.timeout_s,
            clock=self.clock,
        )

    def state(self, layout: RankLayout, memory: MemoryWatch) -> dict[str, torch.Tensor]:
        return {}

    def gradient_sync(self, layout: RankLayout, state: Mapping[str, torch.Tensor], memory: MemoryWatch) -> EmulatedSync:
        parameters = layout.captured.graph.parameters
        names = {name for stage in layout.stages.values() for name in stage.state}
        return EmulatedSync(
            {name: parameters[name] for name in layout.holders if name in names},
            layout.holders,
            all_holders=layout.all_holders,
            sync_bytes=self.emulation.each("sync_bytes", len(layout.plan.stages)),
            clock=self.clock,
            device=self.device,
            run_ahead=self.run_ahead,
            timeout_s=self.timeout_s,
        )

    def stages(
        self,
        layout: RankLayout,
        state: Mapping[str, torch.Tensor],
        randomness: Randomness,
        group: TensorGroup | None,
    ) -> dict[PipeStage, RunnableStage]:
        schedule, plan = layout.schedule, layout.plan
        costs = self.emulation.costs(layout.captured.graph, plan.stages, schedule)
        collectives = None if group is None else self._collectives(layout, group)
        of_program = cut(layout.captured.graph, plan.stages)  # with all transfers, unlike the stages of ``layout``
        return {
            (number, pipe): EmulatedStage(
                stage,
                passes_of(
                    plan.stages[number],
                    of_program[number],
                    layout.tensor,
                    costs,
                    parts=schedule.parts,
                    recompute=number in schedule.recompute,
                ),
                recompute=number in schedule.recompute,
                clock=self.clock,
                device=self.device,
                collectives=collectives,
            )
            for (number, pipe), stage in layout.stages.items()
        }

    def _collectives(self, layout: RankLayout, group: TensorGroup) -> EmulatedCollectives:
        seconds = self.emulation.each("collective_s", len(layout.plan.stages))
        if seconds is None:
            return RealCollectives(group, clock=self.clock)
        return GivenCollectives(group, [each / layout.schedule.parts for each in seconds], clock=self.clock)
