"""What a training reads, by keys: TrainingData that makes its own micro-batches."""

from dataclasses import dataclass

from auto3d.data.batches import Batches
from auto3d.data.interface import BatchSlice
from auto3d.data.keys import DataKeys


@dataclass(frozen=True, kw_only=True)
class DataSettings(DataKeys):
    """Samples and inputs; docs/data.md describes the sources and what each takes."""

    def micro_batches(self, part: BatchSlice) -> Batches:
        return Batches(
            self,
            seed=part.seed,
            global_batch=part.global_batch,
            micro_batch_size=part.micro_batch_size,
            replica=part.replica,
            replicas=part.replicas,
            is_compared=part.is_compared,
        )
