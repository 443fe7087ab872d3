"""torch's FSDP2 (``fully_shard``), layer by layer: parameters, gradients and optimizer state are sharded."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from auto3d.plan import FSDP
from auto3d.runtime.optimizer import make_state
from auto3d.runtime.verify import loss_of
from launch.peers.rank import Iteration, PeerRank


def build(rank: PeerRank) -> Iteration:
    """Each element of a ModuleList is a layer, which is gathered and freed by itself; the rest belongs to the root.

    ``fsdp`` frees a layer's parameters after its forward and shards gradients after every backward, for the least
    memory. ``fsdp:reshard=no`` keeps both whole until the last micro-batch of an iteration, to communicate less.
    """
    reshard = rank.plan.engine == FSDP
    mesh = init_device_mesh(rank.device.type, (rank.world.size,))
    model = rank.user_model()
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    sharded = fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    assert isinstance(sharded, FSDPModule)
    optimizer, learning_rate = rank.optimizer(model)
    make_state(optimizer)
    count, inputs = rank.plan.micro_batches, rank.inputs()

    def run(iteration: int) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=rank.device)
        for index in range(count):
            if not reshard:
                sharded.set_requires_gradient_sync(index == count - 1)
                sharded.set_reshard_after_backward(index == count - 1)
            loss = loss_of(model(**next(inputs))) / count
            loss.backward()
            total += loss.detach()
        if rank.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), rank.clip_norm)
        optimizer.step()
        learning_rate.step()
        return total / rank.plan.dp

    return run


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The elements of the model's ModuleLists, inner ones before those that contain them."""
    found = [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]
    return list(dict.fromkeys(reversed(found)))
