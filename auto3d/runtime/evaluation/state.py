"""The parameters and buffers of an evaluation: the training's, where they are."""

from collections.abc import Mapping
from math import prod

import torch
import torch.distributed as dist

from auto3d.plan import PlanError
from auto3d.runtime.layout import RankLayout
from auto3d.runtime.waiting import waiting_for


def check_state(training: RankLayout, evaluation: RankLayout) -> None:
    """Raise PlanError unless the evaluation holds the state of the rank's stages as training does."""
    held = {name for stage in training.stages.values() for name in stage.state}
    constants = evaluation.captured.exported.constants
    for stage in evaluation.stages.values():
        for name in stage.state:
            if name in constants:
                continue
            if name not in held or evaluation.placement_of(name).split != training.placement_of(name).split:
                raise PlanError(
                    f"stages: in evaluation stage {stage.index} needs {name} as training does not hold it; such a "
                    "model cannot be evaluated under this plan"
                )


def first_pipelines_buffers(
    buffers: Mapping[str, torch.Tensor], training: RankLayout, evaluation: RankLayout
) -> dict[str, torch.Tensor]:
    """This rank's ``buffers`` that training writes to, such as batch statistics, as the first pipeline has them.

    Each pipeline writes to its own copy. All evaluate with the first copy: else the result would depend on who runs a
    sample.
    """
    used = {name for stage in evaluation.model_stages for name in stage.state}
    names = sorted(training.captured.graph.written_buffers & used)
    if not names:
        return {}
    home = {
        name: training.schedule.device_of[stage.index, 0]
        for stage in training.model_stages
        for name in stage.state
        if name in names
    }
    sizes = [prod(training.captured.graph.buffers[name].shape) for name in names]
    everything = torch.zeros(training.plan.tp, sum(sizes), dtype=torch.float64)
    for name, place in zip(names, everything[training.shard].split(sizes), strict=True):
        mesh = training.plan.meshes[home[name]]
        if mesh.at(pipeline=0, replica=0, tensor=training.shard) == (dist.get_rank(),):
            place.copy_(buffers[name].reshape(-1))
    with waiting_for("the buffers of the first pipeline"):
        dist.all_reduce(everything)
    values = {}
    for name, place in zip(names, everything[training.shard].split(sizes), strict=True):
        if name in buffers:
            own = buffers[name]
            values[name] = place.reshape(own.shape).to(own.dtype).to(own.device)
    return values
