"""The parts of a rank that differ between real and emulated devices, whose operations only wait."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from auto3d.runtime.layout import RankLayout
from auto3d.runtime.loss_scale import LossScale
from auto3d.runtime.messages.exchange import Exchange
from auto3d.runtime.messages.gradient_sync import GradientSync
from auto3d.runtime.messages.tensor_group import TensorGroup, TensorParallelRank
from auto3d.runtime.out_of_memory import MemoryWatch
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.stage.build import build_stage
from auto3d.runtime.stage.earlier_slices import programs_of_slices
from auto3d.runtime.stage.module import StageModule
from auto3d.runtime.stage.program import ProgramOfStage
from auto3d.runtime.weights.materialize import materialize
from auto3d.schedule.operation import Kind
from auto3d.schedule.program import PipeStage, Program


class Backend(Protocol):
    """Builds what an executor runs. There are two: RealBackend and ``emulated.EmulatedBackend``."""

    def exchange(self, layout: RankLayout, program: Program) -> Exchange:
        """The messages of ``layout``'s programs, such as ``program``. It makes process groups."""

    def state(self, layout: RankLayout, memory: MemoryWatch) -> dict[str, torch.Tensor]:
        """Parameters, buffers and constants of the rank's stages, by name. It allocates their memory."""

    def gradient_sync(self, layout: RankLayout, state: Mapping[str, torch.Tensor], memory: MemoryWatch) -> GradientSync:
        """The gradients of ``state`` and their sums over ranks. It makes process groups."""

    def stages(
        self,
        layout: RankLayout,
        state: Mapping[str, torch.Tensor],
        randomness: Randomness,
        group: TensorGroup | None,
    ) -> Mapping[PipeStage, StageModule]:
        """The rank's stages, ready to run on ``state``; ``group`` is there if the plan has tensor parallelism."""


@dataclass(frozen=True, kw_only=True)
class RealBackend:
    """Computes on ``device``. ``initial_weights`` replace those that the plan's seed draws.

    A backward begins with the loss times ``loss_scale``.
    """

    device: torch.device
    run_ahead: RunAhead
    initial_weights: Mapping[str, torch.Tensor] | None
    loss_scale: LossScale
    compile: bool = False  # whether stages run compiled code

    def exchange(self, layout: RankLayout, program: Program) -> Exchange:
        return Exchange(
            program,
            layout.transfers,
            ranks_of=layout.peers,
            device_of=layout.schedule.device_of,
            sample_dimensions=layout.sample_dimensions,
            half_of=layout.half_of,
            device=self.device,
            run_ahead=self.run_ahead,
        )

    def state(self, layout: RankLayout, memory: MemoryWatch) -> dict[str, torch.Tensor]:
        exported, graph = layout.captured.exported, layout.captured.graph
        state_names = dict.fromkeys(name for stage in layout.stages.values() for name in stage.state)
        names = [name for name in state_names if name not in exported.constants]
        with memory.during("the making of its weights"):
            initial = materialize(
                exported.build,
                names,
                seed=layout.plan.seed,
                state=self.initial_weights,
                shards={name: shard for name in names if (shard := layout.shard_of(name)) is not None},
            )
            tensors = {name: tensor.to(self.device) for name, tensor in initial.items()}
            tensors |= {name: value.to(self.device) for name, value in exported.constants.items()}
        return {
            name: nn.Parameter(tensor, requires_grad=name in graph.trained) if name in graph.parameters else tensor
            for name, tensor in tensors.items()
        }

    def gradient_sync(self, layout: RankLayout, state: Mapping[str, torch.Tensor], memory: MemoryWatch) -> GradientSync:
        trained = trained_parameters(state)
        # Leaves of old versions of a parameter add to its ``.grad``, so this must exist before the first backward.
        private = frozenset() if layout.schedule.weight_version else layout.private_parameters
        with memory.during("the making of its gradients"):
            return GradientSync(
                trained,
                layout.holders,
                all_holders=layout.all_holders,
                private=[name for name in trained if name in private],
                uncounted=layout.uncounted_parameters,
                rules=layout.rules,
                device=self.device,
                run_ahead=self.run_ahead,
            )

    def stages(
        self,
        layout: RankLayout,
        state: Mapping[str, torch.Tensor],
        randomness: Randomness,
        group: TensorGroup | None,
    ) -> dict[PipeStage, StageModule]:
        schedule, model = layout.schedule, layout.derived
        of_shard = None
        if model is not None and model.share.tp > 1:
            assert group is not None
            of_shard = TensorParallelRank(model=model, group=group)
        split = {o.stage for operations in schedule.operations for o in operations if o.kind is Kind.BACKWARD_INPUT}

        def programs(key: PipeStage) -> list[ProgramOfStage]:
            if model is None or model.share.slices == 1:
                return [ProgramOfStage(layout.stages[key], layout.captured, of_shard)]
            return programs_of_slices(model, [stages[key[0]] for stages in layout.stages_of_slices], of_shard)

        return {
            (number, pipe): build_stage(
                programs((number, pipe)),
                state,
                loss_weight=layout.loss_weight,
                randomness=randomness,
                recompute=number in schedule.recompute,
                kept=layout.plan.stages[number].kept,
                split_backward=number in split,
                old_weights=bool(schedule.weight_version),
                terms=layout.trained_terms,
                loss_scale=self.loss_scale,
                compile=self.compile,
            )
            for number, pipe in layout.stages
        }


def trained_parameters(state: Mapping[str, torch.Tensor]) -> dict[str, nn.Parameter]:
    """The tensors of ``state`` that are trained, in its order."""
    return {n: t for n, t in state.items() if isinstance(t, nn.Parameter) and t.requires_grad}
