"""torch's DistributedDataParallel: each rank has the whole model; gradients are summed beside the last backward."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from auto3d.runtime.optimizer import make_state
from auto3d.runtime.verify import loss_of
from launch.peers.rank import Iteration, PeerRank


def build(rank: PeerRank) -> Iteration:
    """Gradients accumulate without communication (``no_sync``) until the last micro-batch of an iteration.

    A static graph is promised to DDP if there is one micro-batch: with ``no_sync`` torch 2.13 fails on it.
    """
    model = rank.user_model().to(rank.device)
    parameters = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    parallel = DistributedDataParallel(
        model,
        broadcast_buffers=False,  # auto3d's pipelines do not average buffers either
        gradient_as_bucket_view=True,
        static_graph=rank.plan.micro_batches == 1,
        find_unused_parameters=bool(parameters - rank.captured.graph.trained),
    )
    optimizer, learning_rate = rank.optimizer(parallel)
    make_state(optimizer)
    count, inputs = rank.plan.micro_batches, rank.inputs()

    def run(iteration: int) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=rank.device)
        for index in range(count):
            with nullcontext() if index == count - 1 else parallel.no_sync():
                loss = loss_of(parallel(**next(inputs))) / count
                loss.backward()
            total += loss.detach()
        if rank.clip_norm:
            nn.utils.clip_grad_norm_(parallel.parameters(), rank.clip_norm)
        optimizer.step()
        learning_rate.step()
        return total / rank.plan.dp

    return run
