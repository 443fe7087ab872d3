"""What a training asks of its data, from any source."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from auto3d.errors import InputError


class DataError(InputError):
    """Data that is missing or too short."""


@dataclass(frozen=True, kw_only=True)
class BatchSlice:
    """The samples that one rank takes of every global batch, and the seed of their order."""

    seed: int
    global_batch: int
    micro_batch_size: int  # samples that all replicas of a stage run together
    replica: int = 0  # number of the rank among the replicas of its stages
    replicas: int = 1


class MicroBatches(Protocol):
    """Makes the inputs of one rank's micro-batches. Two ranks that ask for the same input get the same values."""

    def micro_batch(self, iteration: int, index: int, names: Collection[str]) -> dict[str, torch.Tensor]:
        """The inputs called ``names`` of micro-batch ``index`` of the global batch, each [samples, *shape]."""


class TrainingData(Protocol):
    """What a training reads. A DataSettings is one; it is pickled or forked to every rank."""

    @property
    def may_ignore_targets(self) -> bool:
        """Whether a label may be one that losses ignore, such as -100."""

    def micro_batches(self, part: BatchSlice) -> MicroBatches:
        """The micro-batches of the rank that takes ``part``."""
