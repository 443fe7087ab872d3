"""A run of a DeepSpeed engine that logs its communication. It is never the timed run, because logged calls block."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from auto3d.capture.model import CapturedModel
from auto3d.data import DataSettings
from auto3d.plan import Plan
from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.measurement import CommunicationCalls
from auto3d.runtime.process.world import World
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.training import naming_this_rank
from auto3d.runtime.waiting import waiting_for
from launch.peers.training import join_as_peer


def log_communication(
    captured: CapturedModel,
    plan: Plan,
    settings: TrainingSettings,
    data: DataSettings,
    world: World,
    *,
    first: int,
    state: Mapping[str, torch.Tensor] | None = None,
) -> list[list[CommunicationCalls]]:
    """The calls of each rank per iteration, from the log of the DeepSpeed engine ``plan.engine``.

    The arguments are as in ``train_by_peer``; the log covers the iterations from number ``first`` on.
    """
    with naming_this_rank():
        rank, build = join_as_peer(captured, plan, settings, data, world, state=state)
        from launch.peers.deepspeed_log import read_log, start_log  # it imports DeepSpeed

        run = build(rank)
        for iteration in range(settings.iterations):
            THIS_RANK.set_phase(f"in iteration {iteration + 1} of {plan.engine}, which logs its communication")
            if iteration == first:
                log = start_log()
            run(iteration)
        own = read_log(log, settings.iterations - first)
        gathered: list[list[CommunicationCalls]] = [[] for _ in range(world.size)]
        with waiting_for("the communication logs of all ranks"):
            dist.all_gather_object(gathered, own)
        return gathered
