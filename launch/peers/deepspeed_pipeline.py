"""DeepSpeed's PipelineModule: 1F1B on stages of the captured program, each as one layer; ZeRO-1 if the plan asks."""

from itertools import repeat

import torch
from deepspeed.pipe import LayerSpec, PipelineModule

from auto3d.partition.stage import cut
from launch.peers.captured_stage import CapturedStage
from launch.peers.deepspeed_setup import engine_of, join_deepspeed
from launch.peers.rank import Iteration, PeerRank


def build(rank: PeerRank) -> Iteration:
    join_deepspeed(rank)
    stages = cut(rank.captured.graph, rank.plan.stages)
    layers = [LayerSpec(_Layer, rank, stage) for stage in stages]  # each rank builds its own stage only
    model = PipelineModule(layers, num_stages=rank.plan.pp, partition_method="uniform")
    optimizer, learning_rate = rank.optimizer(model)
    engine = engine_of(rank, model, optimizer, zero_stage=1 if rank.plan.shard_optimizer else 0)
    nothing = torch.zeros(1)  # stages load their own inputs
    batches = repeat((nothing, nothing))

    def run(iteration: int) -> torch.Tensor | None:
        loss = engine.train_batch(batches)  # the mean over all pipelines, on every rank
        learning_rate.step()
        return loss.detach() / rank.world.size

    return run


class _Layer(CapturedStage):
    """A stage that takes a tuple of tensors or a single one, as DeepSpeed passes values on."""

    def forward(  # type: ignore[override]
        self, received: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if not self.received:
            return super().forward()
        return super().forward(*(received if isinstance(received, tuple) else (received,)))
