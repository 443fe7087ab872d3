"""torch's FSDP2 (``fully_shard``), layer by layer: parameters, gradients and optimizer state are sharded."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from auto3d.plan import FSDP
from launch.peers.accumulation import accumulating
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

    @contextmanager
    def until_the_last(last: bool) -> Iterator[None]:
        if not reshard:
            sharded.set_requires_gradient_sync(last)
            sharded.set_reshard_after_backward(last)
        yield

    return accumulating(rank, model, until_the_last)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The elements of the model's ModuleLists, inner elements before those that contain them."""
    layers = [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]
    return list(dict.fromkeys(reversed(layers)))
