"""DeepSpeed's PipelineModule: 1F1B on stages of the captured program, each as one layer; ZeRO-1 if the plan asks.

Stages that share weights are tied layers, of which DeepSpeed sums the gradients of these weights.
"""

from itertools import repeat

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

from auto3d.partition.stage import cut
from launch.peers.captured_stage import CapturedStage, attribute
from launch.peers.deepspeed_setup import engine_of, join_deepspeed
from launch.peers.limits import shared_weights
from launch.peers.rank import Iteration, PeerRank


def build(rank: PeerRank) -> Iteration:
    join_deepspeed(rank)
    stages = cut(rank.captured.graph, rank.plan.stages)
    shared = shared_weights(stages, rank.captured.graph)
    tied_stages = next(iter(shared.values()), ())  # limits.py has checked that all are on the same stages
    tied = [attribute(name) for name in shared]
    layers = [  # each rank builds its own stage only
        TiedLayerSpec("tied", _Layer, rank, stage, tied_weight_attr=tied)
        if stage.index in tied_stages
        else LayerSpec(_Layer, rank, stage)
        for stage in stages
    ]
    model = PipelineModule(layers, num_stages=rank.plan.pp, partition_method="uniform")
    _count_once(model, tied, is_first=model.stage_id in tied_stages[:1])
    optimizer, learning_rate = rank.optimizer(model)
    engine = engine_of(rank, model, optimizer, zero_stage=1 if rank.plan.shard_optimizer else 0)
    nothing = torch.zeros(1)  # stages load their own inputs
    batches = repeat((nothing, nothing))

    def run(iteration: int) -> torch.Tensor | None:
        loss = engine.train_batch(batches)  # the mean over all pipelines, on every rank
        learning_rate.step()
        return loss.detach() / rank.world.size

    return run


def _count_once(model: PipelineModule, tied: list[str], *, is_first: bool) -> None:
    """Have the gradient's norm count shared weights on the first stage that has them only, and all others everywhere.

    DeepSpeed takes all weights of a tied layer as shared. ZeRO-1 reads one mark, the plain optimizer the other.
    """
    for name, parameter in model.named_parameters():
        counts = is_first or name.rpartition(".")[2] not in tied
        parameter.ds_pipe_replicated = not counts
        parameter.model_parallel = counts


class _Layer(CapturedStage):
    """A stage that takes a tuple of tensors or a single tensor, as DeepSpeed passes values on."""

    def forward(  # type: ignore[override]
        self, received: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if not self.received:
            return super().forward()
        return super().forward(*(received if isinstance(received, tuple) else (received,)))
