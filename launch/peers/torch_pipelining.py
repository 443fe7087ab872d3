"""torch.distributed.pipelining with its own schedules, on stages of the captured program; DDP around each if dp > 1.

Its tracer does not capture whole models of transformers, so the stages are auto3d's: the comparison is of runtimes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel

from auto3d.capture.graph import Value
from auto3d.mesh import PIPELINE
from auto3d.partition.stage import cut
from auto3d.runtime.optimizer.state import make_state
from auto3d.runtime.process.world import new_group
from auto3d.schedule import schedule_of
from launch.peers.captured_stage import CapturedStage
from launch.peers.rank import Iteration, PeerRank

ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL_STAGES = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "looped-bfs": ScheduleLoopedBFS,
    "zb-v": ScheduleZBVZeroBubble,
}


def build(rank: PeerRank) -> Iteration:
    plan = rank.plan
    device, place = plan.position(rank.world.rank)
    pipelines = [
        new_group([member for mesh in plan.meshes for member in mesh.at(pipeline=number)], device=rank.device)
        for number in range(plan.dp)
    ]
    replicas = [new_group(mesh.ranks, device=rank.device) for mesh in plan.meshes]
    stages = cut(rank.captured.graph, plan.stages)
    own = [stage for (stage, _), home in sorted(schedule_of(plan).device_of.items()) if home == device]
    modules = [CapturedStage(rank, stages[number]) for number in own]
    parallel: list[nn.Module] = list(modules)
    if plan.dp > 1:
        parallel = [
            DistributedDataParallel(
                module, process_group=replicas[device], broadcast_buffers=False, gradient_as_bucket_view=True
            )
            for module in modules
        ]
    pipeline_stages = [
        PipelineStage(
            module,
            number,
            len(stages),
            rank.device,
            input_args=tuple(_example(value) for value in captured.received),
            output_args=tuple(_example(value) for value in captured.sent),
            group=pipelines[place[PIPELINE]],
        )
        for module, captured, number in zip(parallel, modules, own, strict=True)
    ]
    schedule = _schedule(plan.schedule, pipeline_stages, plan.micro_batches)
    optimizer, learning_rate = rank.optimizer(nn.ModuleList(modules))
    make_state(optimizer)
    has_loss = any(stages[number].has_loss for number in own)
    target = torch.zeros(plan.micro_batches) if has_loss else None

    def run(iteration: int) -> torch.Tensor | None:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        schedule.step(target=target, losses=losses if has_loss else None, return_outputs=False)
        if rank.clip_norm:
            _clip(modules, rank.clip_norm, pipelines[place[PIPELINE]])
        optimizer.step()
        learning_rate.step()
        return torch.stack(losses).detach().mean() / plan.dp if has_loss else None

    return run


def _schedule(
    name: str, stages: list[PipelineStage], micro_batches: int
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    if name in ONE_STAGE:
        return ONE_STAGE[name](stages[0], micro_batches, loss_fn=_loss)
    return SEVERAL_STAGES[name](list(stages), micro_batches, loss_fn=_loss)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The output of the last stage, which computes the loss itself."""
    return output


def _example(value: Value) -> torch.Tensor:
    """A tensor without memory like ``value``, from which the peer allocates its receive buffers."""
    dtype = getattr(torch, value.dtype)
    return torch.empty(value.shape, dtype=dtype, device="meta", requires_grad=value.differentiable)


def _clip(modules: list[CapturedStage], clip_norm: float, pipeline: dist.ProcessGroup) -> None:
    """Clip by the norm of all gradients of the pipeline; its ranks hold different stages."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    square = norm.square()
    dist.all_reduce(square, group=pipeline)
    nn.utils.clip_grads_with_norm_(parameters, clip_norm, square.sqrt())
