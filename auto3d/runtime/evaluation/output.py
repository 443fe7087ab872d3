"""An output of an evaluation, such as logits: from the ranks that make it to all ranks, in the order of the samples."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist

from auto3d.capture.model import CapturedModel
from auto3d.capture.shard import Shard
from auto3d.errors import InputError
from auto3d.partition.samples import made_from_samples
from auto3d.runtime.layout import RankLayout
from auto3d.runtime.waiting import waiting_for
from auto3d.tensor_placement import PlacementKind, TensorPlacement


@dataclass(frozen=True, kw_only=True)
class Output:
    """One output, as the stage that makes it has it for one micro-batch."""

    name: str
    value: str  # name of the value in the rank's program
    stage: int
    shape: tuple[int, ...]  # shape of the whole value
    local_shape: tuple[int, ...]  # shape of this rank's shard of it
    dtype: torch.dtype  # type of the result
    summed: torch.dtype  # in which it is gathered
    placed: TensorPlacement

    @staticmethod
    def of(name: str, value: str, model: CapturedModel, layout: RankLayout) -> "Output":
        graph = layout.captured.graph
        whole = model.graph.value(model.graph.outputs[name])
        samples = model.graph.micro_batch_size
        if not whole.shape or whole.shape[0] != samples or whole.name not in made_from_samples(model.graph):
            raise InputError(
                f"evaluation: output {name} has shape {list(whole.shape)} for {samples} samples; an output needs one "
                "entry per sample along its first dimension"
            )
        maker = graph.nodes[graph.producer[value]].name
        dtype = getattr(torch, whole.dtype)
        return Output(
            name=name,
            value=value,
            stage=next(stage.index for stage in layout.model_stages if maker in stage.nodes),
            shape=whole.shape,
            local_shape=graph.value(value).shape,
            dtype=torch.float32 if dtype.is_floating_point else dtype,
            summed=torch.float32 if dtype.is_floating_point else torch.int64,
            placed=layout.placement_of(value),
        )

    def memory(self, micro_batches: int, device: torch.device) -> torch.Tensor:
        """Memory on the host for what this rank makes in one global batch; a GPU copies to it without the host."""
        shape = (micro_batches, *self.local_shape)
        return torch.empty(shape, dtype=self.summed, pin_memory=device.type == "cuda")

    def of_all_ranks(self, local: torch.Tensor, micro_batches: Collection[int], layout: RankLayout) -> torch.Tensor:
        """The output of a whole global batch, [samples, …]; ``local`` has the part of this rank's ``micro_batches``."""
        # Each element is written by one rank and zero on all others, or a sum of what the shards have.
        whole = torch.zeros((layout.plan.global_batch, *self.shape[1:]), dtype=self.summed)
        rows = layout.samples // layout.replicas
        for micro_batch in micro_batches:
            first = (layout.first_micro_batch + micro_batch) * layout.samples + layout.replica * rows
            place = whole[first : first + rows]
            if self.placed.split is not None:
                Shard(self.placed.split, layout.shard, layout.plan.tp).put_back(local[micro_batch], place)
            elif layout.shard == 0 or self.placed.kind is PlacementKind.PARTIAL:
                place.copy_(local[micro_batch])
        with waiting_for(f"output {self.name} of all ranks"):
            dist.all_reduce(whole)
        return whole
