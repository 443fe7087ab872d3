"""torch's DistributedDataParallel: each rank has the whole model; gradients are summed beside the last backward."""

from contextlib import nullcontext

from torch.nn.parallel import DistributedDataParallel

from launch.peers.accumulation import accumulating
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
    return accumulating(rank, parallel, lambda last: nullcontext() if last else parallel.no_sync())
