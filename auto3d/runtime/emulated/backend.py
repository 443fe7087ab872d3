"""Emulated devices: everything is real except the arithmetic, in whose place an operation waits for its given time.

Processes, schedule, executor, messages, tensor-parallel collectives and gradient sums are as in real training and
have their true sizes, unless they are given others, or times. No weights are made, no data is loaded and nothing is
computed, so there is no loss. A few cores can therefore run as many devices as they can carry messages for.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any

import torch

from auto3d.capture.graph import Value
from auto3d.partition.stage import Stage, cut
from auto3d.runtime.emulated.collectives import (
    EmulatedCollectives,
    GivenCollectives,
    RealCollectives,
    Wait,
)
from auto3d.runtime.emulated.device_clock import DeviceClock
from auto3d.runtime.emulated.links import EmulatedExchange, EmulatedSync, GivenExchange, GivenSync
from auto3d.runtime.emulated.passes import Passes, passes_of
from auto3d.runtime.emulated.settings import Emulation
from auto3d.runtime.layout import RankLayout
from auto3d.runtime.messages.tensor_group import TensorGroup
from auto3d.runtime.out_of_memory import MemoryWatch
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.stage.module import Gradients, StageModule, Tensors
from auto3d.runtime.stage.target_counts import TargetCounts
from auto3d.runtime.weights.gradients import DeferredGradients
from auto3d.runtime.weights.versions import WeightVersions
from auto3d.schedule.operation import Kind
from auto3d.schedule.program import PipeStage, Program
from auto3d.simulate.costs import Costs


class EmulatedComputation:
    """Waits where another Computation computes. The tensors that it gives have their true sizes and are allocated once.

    ``passes`` has what each kind of operation does; ``collectives`` runs its collectives, if it has any.
    """

    def __init__(
        self,
        stage: Stage,
        loss: str,
        passes: Passes,
        *,
        recompute: bool,
        clock: DeviceClock,
        device: torch.device,
        collectives: EmulatedCollectives | None = None,
    ) -> None:
        self.targets = TargetCounts()
        self._stage, self._loss = stage, loss
        self._passes = passes
        self._collectives = collectives
        self._recompute = recompute
        self._recomputed: set[int] = set()  # recomputed micro-batches whose backward has not run
        self._clock = clock
        self._deferred = DeferredGradients()
        self._made = _empty((transfer.value for transfer in stage.sent), device) | {loss: torch.tensor(nan)}
        self._sent_back = _empty((t.value for t in stage.received if t.value.differentiable), device)

    def as_stage(self) -> StageModule:
        """The stage that waits, whose loss is NaN."""
        loss = self._loss if self._stage.has_loss else None
        return StageModule(self._stage, [self], WeightVersions({}, several=False), loss=loss, deferred=self._deferred)

    def forward(self, micro_batch: int, state: Tensors, taken: Tensors) -> Tensors:
        self._work(Kind.FORWARD)
        return self._made

    def recompute(self, micro_batch: int) -> None:
        self._work(Kind.RECOMPUTE)
        self._recomputed.add(micro_batch)

    def backward(self, micro_batch: int, gradients: Gradients, *, defer_weights: bool) -> dict[str, torch.Tensor]:
        if self._recompute and micro_batch not in self._recomputed:
            self.recompute(micro_batch)
        self._recomputed.discard(micro_batch)
        if defer_weights:
            self._deferred.add(partial(self._work, Kind.BACKWARD_WEIGHT))
        self._work(Kind.BACKWARD_INPUT if defer_weights else Kind.BACKWARD)
        return self._sent_back

    def _work(self, kind: Kind) -> None:
        pending: dict[int, Wait] = {}
        for number, step in enumerate(self._passes[kind]):
            for earlier in step.waits:
                pending.pop(earlier)()
            self._clock.work(step.seconds)
            if step.collective is not None:
                assert self._collectives is not None
                pending[number] = self._collectives.begin(step.collective, self._stage.index, step.share)
        for wait in pending.values():
            wait()


def _empty(values: Iterable[Value], device: torch.device) -> dict[str, torch.Tensor]:
    return {value.name: torch.zeros(value.shape, dtype=getattr(torch, value.dtype), device=device) for value in values}


@dataclass(frozen=True, kw_only=True)
class EmulatedBackend:
    """A Backend for emulated devices: operations only wait, for the times in ``emulation``."""

    emulation: Emulation
    device: torch.device
    run_ahead: RunAhead
    clock: DeviceClock

    def exchange(self, layout: RankLayout, program: Program) -> EmulatedExchange:
        options: dict[str, Any] = {
            "ranks_of": layout.peers,
            "device_of": layout.schedule.device_of,
            "sample_dimensions": self._sample_dimensions(layout),
            "half_of": {} if self.emulation.has_own_messages else layout.half_of,
            "device": self.device,
            "run_ahead": self.run_ahead,
            "clock": self.clock,
        }
        if self.emulation.send_s is None:
            return EmulatedExchange(program, layout.transfers, **options)
        messages = self._costs(layout).messages
        seconds = [message.forward / layout.schedule.parts for message in messages]
        return GivenExchange(program, layout.transfers, seconds=seconds, **options)

    def _sample_dimensions(self, layout: RankLayout) -> Mapping[str, int]:
        if self.emulation.has_own_messages:
            return {transfer.value.name: 0 for transfer in layout.transfers}
        return layout.sample_dimensions

    def state(self, layout: RankLayout, memory: MemoryWatch) -> dict[str, torch.Tensor]:
        return {}

    def gradient_sync(self, layout: RankLayout, state: Mapping[str, torch.Tensor], memory: MemoryWatch) -> EmulatedSync:
        parameters = layout.captured.graph.parameters
        names = {name for stage in layout.stages.values() for name in stage.state}
        trained = {name: parameters[name] for name in layout.holders if name in names}
        options: dict[str, Any] = {
            "all_holders": layout.all_holders,
            "clock": self.clock,
            "device": self.device,
            "run_ahead": self.run_ahead,
        }
        if self.emulation.sync_s is None:
            sync_bytes = self.emulation.each("sync_bytes", len(layout.plan.stages))
            return EmulatedSync(trained, layout.holders, sync_bytes=sync_bytes, **options)
        return GivenSync(trained, layout.holders, seconds=self._costs(layout).sync, **options)

    def stages(
        self,
        layout: RankLayout,
        state: Mapping[str, torch.Tensor],
        randomness: Randomness,
        group: TensorGroup | None,
    ) -> dict[PipeStage, StageModule]:
        schedule, plan = layout.schedule, layout.plan
        costs = self._costs(layout)
        collectives = None if group is None else self._collectives(layout, group)
        of_program = cut(layout.captured.graph, plan.stages)  # with all transfers, unlike the stages of ``layout``
        return {
            (number, pipe): EmulatedComputation(
                stage,
                layout.captured.graph.loss,
                passes_of(
                    plan.stages[number],
                    of_program[number],
                    layout.derived,
                    costs,
                    parts=schedule.parts,
                    recompute=number in schedule.recompute,
                ),
                recompute=number in schedule.recompute,
                clock=self.clock,
                device=self.device,
                collectives=collectives,
            ).as_stage()
            for (number, pipe), stage in layout.stages.items()
        }

    def _costs(self, layout: RankLayout) -> Costs:
        plan = layout.plan
        return self.emulation.costs(layout.captured.graph, plan.stages, layout.schedule, dp=plan.dp)

    def _collectives(self, layout: RankLayout, group: TensorGroup) -> EmulatedCollectives:
        seconds = self.emulation.each("collective_s", len(layout.plan.stages))
        if seconds is None:
            return RealCollectives(group, clock=self.clock)
        parts = layout.schedule.parts * layout.replicas
        return GivenCollectives(group, [stage_s / parts for stage_s in seconds], clock=self.clock)
