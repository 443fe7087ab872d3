"""Micro-batches of other sizes than the plan's: of fewer or shorter samples than the model was captured for.

They run by stages of their own size, which share the weights of the usual stages, and their messages have other shapes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from auto3d.capture.model import CapturedModel
from auto3d.data.interface import Lengths
from auto3d.partition.stage import Transfer, same_stages
from auto3d.plan import NO_OVERLAP, Plan
from auto3d.runtime.layout import PlanLayout, lay_out_plan
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.stage.module import StageModule
from auto3d.schedule import schedule_of
from auto3d.schedule.program import PipeStage


@dataclass(frozen=True, kw_only=True)
class SizedStages:
    """What a rank runs of micro-batches of one size."""

    stages: Mapping[PipeStage, StageModule]
    transfers: Sequence[Transfer]  # the values that cross them


@dataclass(frozen=True, kw_only=True)
class ShorterSamples:
    """What a rank needs to run micro-batches of shorter samples."""

    data: Lengths
    first_micro_batch: int  # the pipeline's first in the global batch
    sized: Mapping[int, SizedStages]  # by length

    def of(self, iteration: int, micro_batches: int) -> dict[int, SizedStages]:
        """The stages for ``iteration``, by their number among the ``micro_batches`` of the pipeline."""
        lengths = (
            (number, self.data.of(iteration, self.first_micro_batch + number)) for number in range(micro_batches)
        )
        return {number: self.sized[length] for number, length in lengths if length is not None}


def why_not_sized(
    captured: CapturedModel, other: Callable[[], CapturedModel], plan: Plan, settings: TrainingSettings, what: str
) -> str:
    """Why micro-batches of ``what`` cannot run as ``other()`` captures the model; empty if they can."""
    schedule = schedule_of(plan)
    if schedule.parts > 1 or schedule.weight_version or plan.tensor_overlap != NO_OVERLAP:
        return "the plan divides micro-batches"
    if any(stage.replicas > 1 for stage in plan.stages):
        return "stages have replicas"
    if settings.emulation is not None:
        return "devices are emulated"
    if not captured.graph.same_operations(other().graph):
        return f"the model runs other operations on {what}"
    return ""


def lay_out_sized(common: PlanLayout, captured: CapturedModel) -> PlanLayout:
    """``common`` for micro-batches of another size, for which the model is ``captured``, on the same stages."""
    size = captured.graph.micro_batch_size
    plan = replace(
        common.plan,
        graph=captured.graph.fingerprint,
        stages=same_stages(common.plan.stages, common.captured.graph, captured.graph),
        micro_batch_size=size,
        global_batch=common.plan.global_batch // common.plan.micro_batch_size * size,
    )
    layout = lay_out_plan(captured, plan, common.settings, common.schedule, read_once=common.read_once)
    return replace(layout, terms=common.terms)  # its means weigh as much as the other micro-batches'
