"""An iteration of a peer that trains the whole model: gradients accumulate over micro-batches, then one update."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from auto3d.runtime.optimizer.state import make_state
from auto3d.runtime.verify.eager import loss_of
from launch.peers.rank import Iteration, PeerRank


def accumulating(rank: PeerRank, model: nn.Module, around: Callable[[bool], AbstractContextManager[None]]) -> Iteration:
    """The iteration of ``model``; its gradients are summed over the ranks by the peer itself.

    Each micro-batch runs inside ``around(last)``, where ``last`` says whether it is the last of the iteration.
    """
    optimizer, learning_rate = rank.optimizer(model)
    make_state(optimizer)
    count, inputs = rank.plan.micro_batches, rank.inputs()

    def run(iteration: int) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=rank.device)
        for index in range(count):
            with around(index == count - 1):
                loss = loss_of(model(**next(inputs))) / count
                loss.backward()
            total += loss.detach()
        if rank.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), rank.clip_norm)
        optimizer.step()
        learning_rate.step()
        return total / rank.plan.dp

    return run
