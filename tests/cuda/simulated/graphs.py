"""A CUDA graph of the forward and backward of a small module on the simulated CUDA."""

import numpy as np
import torch
from torch import nn

from auto3d.runtime.process.world import World

REPLAYS = 3
SAMPLES, WIDTH = 5, 8
REFUSED = "cudaErrorStreamCaptureUnsupported"  # in torch's error


def _module(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)


def _step(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The loss of ``inputs``; the gradients are new tensors."""
    module.zero_grad(set_to_none=True)
    loss = module(inputs).square().mean()
    loss.backward()
    return loss.detach()


def _inputs() -> list[torch.Tensor]:
    return list(torch.randn(REPLAYS, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)))


def _captured(module: nn.Module, inputs: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph that reads ``inputs``, and the loss that it writes; it has the memory of its tensors."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _step(module, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = _step(module, inputs)
    return graph, loss


def _found(module: nn.Module, loss: torch.Tensor) -> dict[str, np.ndarray]:
    gradients = {name: part.grad.cpu().numpy() for name, part in module.named_parameters() if part.grad is not None}
    return gradients | {"loss": loss.cpu().numpy()}


def replayed(world: World) -> list[dict[str, np.ndarray]]:
    """The loss and the gradients of each replay, before which the input is overwritten, and all memory that is free."""
    device = torch.device("cuda", world.rank)
    module, inputs = _module(device), torch.zeros(SAMPLES, WIDTH, device=device)
    graph, loss = _captured(module, inputs)
    found = []
    for new in _inputs():
        torch.full((1 << 20,), torch.nan, device=device)
        inputs.copy_(new)
        graph.replay()
        found.append(_found(module, loss))
    return found


def eager(world: World) -> list[dict[str, np.ndarray]]:
    """The same without a graph on a CPU."""
    module = _module(torch.device("cpu"))
    return [_found(module, _step(module, new)) for new in _inputs()]


def refused(world: World) -> str:
    """The first line of the error of a graph that reads a value of the device while it is captured."""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.ones((), device="cuda").item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def kept(world: World) -> tuple[int, int]:
    """Bytes that the allocator keeps for a graph alone, and by which its replays change what is allocated."""
    device = torch.device("cuda", world.rank)
    inputs = torch.zeros(SAMPLES, WIDTH, device=device)
    graph, _ = _captured(_module(device), inputs)
    allocated = []
    for _ in range(REPLAYS):
        graph.replay()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated(device))
    segments = torch.cuda.memory_snapshot()
    own = sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == graph.pool())
    return own, max(allocated) - min(allocated)
