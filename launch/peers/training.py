"""Trains by a peer, with the result that auto3d's own training gives: the same times and memory, read the same way."""

from collections.abc import Callable, Mapping
from importlib import import_module
from time import perf_counter

import torch

from auto3d.allocator import keep_freed_memory
from auto3d.capture.model import CapturedModel
from auto3d.data import DataSettings
from auto3d.plan import DDP, DEEPSPEED_PIPELINE, FSDP, FSDP_GATHERED, TORCH_PIPELINING, ZERO_1, ZERO_2, ZERO_3, Plan
from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.messages.gathered import of_all_ranks
from auto3d.runtime.process.world import World
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.training import TrainingResult, memory_of_ranks, naming_this_rank, start_rank
from auto3d.runtime.watch.peak_memory import PeakMemory
from launch.peers.limits import check_engine
from launch.peers.rank import Iteration, PeerRank

FILES = {
    TORCH_PIPELINING: "torch_pipelining",
    DEEPSPEED_PIPELINE: "deepspeed_pipeline",
    ZERO_1: "deepspeed_zero",
    ZERO_2: "deepspeed_zero",
    ZERO_3: "deepspeed_zero",
    DDP: "ddp",
    FSDP: "fsdp",
    FSDP_GATHERED: "fsdp",
}
"""Engine -> its file here; it has one function, build(rank: PeerRank) -> Iteration."""


def train_by_peer(
    captured: CapturedModel,
    plan: Plan,
    settings: TrainingSettings,
    data: DataSettings,
    world: World,
    *,
    state: Mapping[str, torch.Tensor] | None = None,
) -> TrainingResult:
    """Train for ``settings.iterations`` as rank ``world.rank`` by the peer ``plan.engine``.

    As ``auto3d.runtime.training.train``, without checkpoints. The peak memory leaves out the building of the model,
    which a peer needs whole on each rank. Raises EngineRefusalError, a PlanError, for what the peer cannot train.
    """
    check_engine(plan, lambda: captured.graph, settings, unequal_targets=data.has_unequal_targets)
    with naming_this_rank():
        rank, build = join_as_peer(captured, plan, settings, data, world, state=state)
        device = rank.device
        memory = PeakMemory(device)
        if device.type == "cpu":
            keep_freed_memory()
        run = build(rank)
        memory.restart()
        losses: list[torch.Tensor | None] = []
        seconds: list[float] = []
        before = perf_counter()
        for iteration in range(settings.iterations):
            THIS_RANK.set_phase(f"in iteration {iteration + 1} of {plan.engine}")
            losses.append(run(iteration))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            now = perf_counter()
            seconds.append(now - before)
            before = now
        shares = [0.0 if loss is None else float(loss) for loss in losses]
        bytes_of_ranks = memory_of_ranks(memory.read(), None)
        return TrainingResult(
            loss=of_all_ranks(shares, torch.float64).sum(dim=0).tolist(),
            grad_norm=[None] * len(losses),
            iteration_s=of_all_ranks(seconds, torch.float64).max(dim=0).values.tolist(),
            peak_bytes=bytes_of_ranks["peak_bytes"],
            reserved_bytes=bytes_of_ranks["reserved_bytes"],
            used_bytes=bytes_of_ranks["used_bytes"],
            predicted_bytes=bytes_of_ranks["predicted_bytes"],
        )


def join_as_peer(
    captured: CapturedModel,
    plan: Plan,
    settings: TrainingSettings,
    data: DataSettings,
    world: World,
    *,
    state: Mapping[str, torch.Tensor] | None,
) -> tuple[PeerRank, Callable[[PeerRank], Iteration]]:
    """Join the world as rank ``world.rank``; returns this rank and the function of its peer that builds it."""
    device = start_rank(settings, world, collectives_on_device=True)
    peer = import_module(f"launch.peers.{FILES[plan.engine]}")  # before the memory is read, like other libraries
    rank = PeerRank(world=world, plan=plan, captured=captured, settings=settings, data=data, device=device, state=state)
    return rank, peer.build
