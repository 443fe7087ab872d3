"""A global batch that lacks samples, as the last of an epoch may: it runs as it is, like one process runs it.

Its last micro-batch may have fewer samples than the others; it runs by stages of that size, which share the weights of
the usual ones. The micro-batches that it does not have are left out of the program, on all ranks of a pipeline alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from auto3d.capture.model import CapturedModel
from auto3d.data.interface import Incomplete
from auto3d.partition.stage import Transfer, same_stages
from auto3d.plan import NO_OVERLAP, Plan
from auto3d.runtime.layout import PlanLayout, lay_out_plan
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.stage import StageModule
from auto3d.schedule import schedule_of
from auto3d.schedule.program import PipeStage


@dataclass(frozen=True)
class IncompleteBatch:
    """What a rank runs of one."""

    absent: frozenset[int]  # micro-batches of its pipeline that the global batch does not have
    short: int | None  # the micro-batch with fewer samples; None: no such one is of its pipeline
    present: float  # fraction of the micro-batches of a complete global batch that this one has


@dataclass(frozen=True, kw_only=True)
class IncompleteBatches:
    """What a rank needs to run incomplete global batches."""

    data: Incomplete
    plan: Plan
    first_micro_batch: int  # the pipeline's first in the global batch
    stages: Mapping[PipeStage, StageModule]  # those that run the short micro-batch
    transfers: Sequence[Transfer]  # the values that cross them

    def of(self, iteration: int) -> IncompleteBatch | None:
        """That of ``iteration``; None if its global batch is complete."""
        samples, size, count = self.data.samples(iteration), self.plan.micro_batch_size, self.plan.micro_batches
        if samples == self.plan.global_batch:
            return None
        present = -(-samples // size)
        last = present - 1 - self.first_micro_batch
        return IncompleteBatch(
            absent=frozenset(range(max(0, last + 1), count)),
            short=last if samples % size and 0 <= last < count else None,
            present=present / (self.plan.dp * count),
        )


def why_not(captured: CapturedModel, plan: Plan, settings: TrainingSettings, short: int) -> str:
    """Why batches whose last micro-batch has ``short`` samples cannot run as they are; empty if they can."""
    if not settings.weighs_micro_batches_alike:
        return f"loss_mean is {settings.loss_mean}, which does not weigh micro-batches alike"
    schedule = schedule_of(plan)
    if schedule.parts > 1 or schedule.weight_version or plan.tensor_overlap != NO_OVERLAP:
        return "the plan divides micro-batches"
    if any(stage.replicas > 1 for stage in plan.stages):
        return "stages have replicas"
    if settings.emulation is not None:
        return "devices are emulated"
    if not captured.graph.same_operations(captured.at(short).graph):
        return f"the model runs other operations on {short} samples"
    return ""


def lay_out_short(common: PlanLayout, short: int) -> PlanLayout:
    """``common`` for micro-batches of ``short`` samples, on the same stages."""
    captured = common.captured.at(short)
    plan = replace(
        common.plan,
        graph=captured.graph.fingerprint,
        stages=same_stages(common.plan.stages, common.captured.graph, captured.graph),
        micro_batch_size=short,
        global_batch=common.plan.global_batch // common.plan.micro_batch_size * short,
    )
    layout = lay_out_plan(captured, plan, common.settings, common.schedule, read_once=common.read_once)
    return replace(layout, terms=common.terms)  # its means weigh as much as those of the other micro-batches
