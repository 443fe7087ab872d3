"""DeepSpeed's ZeRO: stage 1 shards the optimizer state, stage 2 gradients too, stage 3 parameters too."""

import torch

from auto3d.plan import ZERO_1, ZERO_2, ZERO_3
from auto3d.runtime.verify.eager import loss_of
from launch.peers.deepspeed_setup import engine_of, join_deepspeed
from launch.peers.rank import Iteration, PeerRank

STAGES = {ZERO_1: 1, ZERO_2: 2, ZERO_3: 3}


def build(rank: PeerRank) -> Iteration:
    """The optimizer's state is left to DeepSpeed, which makes it for its own shards."""
    join_deepspeed(rank)
    model = rank.user_model()
    optimizer, learning_rate = rank.optimizer(model)
    engine = engine_of(rank, model, optimizer, zero_stage=STAGES[rank.plan.engine])

    inputs = rank.inputs()

    def run(iteration: int) -> torch.Tensor:
        total = torch.zeros((), device=rank.device)
        for _ in range(rank.plan.micro_batches):
            loss = loss_of(engine(**next(inputs)))
            engine.backward(loss)
            engine.step()  # updates after the last micro-batch of the iteration
            total += loss.detach()
        learning_rate.step()
        return total / (rank.plan.micro_batches * rank.plan.dp)

    return run
