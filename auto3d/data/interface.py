"""What a training asks of its data, and what a source of samples gives."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from auto3d.capture.export import InputSpec
from auto3d.errors import InputError

IGNORED = -100  # a target that the loss does not count, as torch's cross-entropy and transformers have it


class DataError(InputError):
    """Data that is missing, damaged, too short, or does not fit the model."""


def note(error: Exception, samples: str) -> None:
    """Have an ``error`` of the user's code say which ``samples`` were read."""
    error.add_note(f"reading {samples} failed")


@contextmanager
def naming(samples: str) -> Iterator[None]:
    """Have an error of the user's code inside say which ``samples`` were read."""
    try:
        yield
    except Exception as error:
        note(error, samples)
        raise


@dataclass(frozen=True, kw_only=True)
class BatchSlice:
    """The samples that one rank takes of every global batch, and the seed of their order."""

    seed: int
    global_batch: int
    micro_batch_size: int  # samples that all replicas of a stage run together
    replica: int = 0  # number of the rank among the replicas of its stages
    replicas: int = 1
    read_once: bool = False  # one rank reads for all stages
    is_compared: bool = True  # other ranks read of it too; False: readings need no fingerprints
    micro_batches: range = range(0)  # numbers of the micro-batches that it runs of each global batch, if known


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a rank has read of one micro-batch."""

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)  # [samples, *shape] each
    fingerprints: np.ndarray | None = None
    """A number of each sample, from all that a process can read of it; None if the inputs are not read but drawn, or if
    it takes another reading. Where one rank reads for all stages, it is of the sample before anything is drawn for the
    batch."""
    items: int | None = None
    """Targets of the whole micro-batch, of all replicas, as the data counts them; None if it does not."""


class MicroBatches(Protocol):
    """Makes the inputs of one rank's micro-batches.

    Two ranks that ask for the same input must get the same values. The runtime compares the fingerprints. Where one
    rank reads for all stages, a reading without ``names`` has the fingerprints alone.
    """

    def read(self, iteration: int, index: int, names: Collection[str]) -> Reading:
        """The inputs called ``names`` of micro-batch ``index`` of the global batch."""

    def fingerprints(self, iteration: int, index: int, replica: int | None = None) -> np.ndarray | None:
        """The fingerprints of what a stage reads of micro-batch ``index``, on its ``replica``; None: this rank's."""


@dataclass(frozen=True)
class Incomplete:
    """Global batches that lack samples, as the last of an epoch may."""

    short: int  # samples of their last micro-batch, which may be a whole micro-batch
    samples: Callable[[int], int]  # iteration -> samples of its global batch


@dataclass(frozen=True)
class Lengths:
    """Micro-batches of shorter samples than the model was captured for."""

    inputs: Mapping[int, Mapping[str, InputSpec]]  # length -> inputs of a sample
    of: Callable[[int, int], int | None]
    """(iteration, micro-batch of the global batch) -> its length; None: it is as the model was captured."""


class TrainingData(Protocol):
    """What a training reads, such as a DataSettings; it is pickled or forked to every rank."""

    @property
    def may_ignore_targets(self) -> bool:
        """Whether an input may hold IGNORED, so that micro-batches may have unequal numbers of targets that count.

        A training whose loss cannot be weighted by these numbers must refuse such data.
        """

    @property
    def read_once(self) -> bool:
        """Whether another reading of a micro-batch may differ, so that one rank should read it for all stages. False:
        each stage reads its inputs."""

    @property
    def is_by_position(self) -> bool:
        """Whether a sample is a place in a file, or drawn from its number, so that reading it costs next to nothing."""

    @property
    def is_read_anew(self) -> bool:
        """Whether fingerprints take another reading, because what a rank trains was drawn."""

    @property
    def incomplete(self) -> Incomplete | None:
        """The global batches that lack samples and run as they are; None: all are complete, or filled."""

    def begins_epoch(self, iteration: int) -> bool:
        """Whether ``iteration``, from 0, begins an epoch that code of the user's may be told of."""

    @property
    def lengths(self) -> Lengths | None:
        """The micro-batches of shorter samples; None: all samples are alike, or padded."""

    def reads(self, names: Collection[str]) -> bool:
        """Whether a reading of the inputs called ``names`` has fingerprints."""

    def micro_batches(self, part: BatchSlice) -> MicroBatches:
        """The micro-batches of the rank that takes ``part``."""


class Source(Protocol):
    """The samples of one source. Files are opened when they are first read."""

    samples: int | None  # None: without an end; a sample is then drawn from its number in the training
    pad: int  # token that fills a sample with fewer tokens than the model takes

    def tokens(self, sample: int, seed: int) -> np.ndarray:
        """The tokens of ``sample``: sequence_length + 1 of them, or fewer where a document ends. int64."""

    def column(self, sample: int, name: str) -> np.ndarray:
        """The value of the column ``name`` in ``sample``."""

    def whole(self, sample: int) -> Mapping[str, np.ndarray]:
        """What each process knows that reads any column of ``sample``, to compare: all columns where these are read
        together, or what tells a table, whose columns are read one by one, from another; nothing if there is none."""

    def largest(self, column: str | None) -> int | None:
        """The largest integer in a column, or among the tokens (None); None if that is not known."""

    def describe(self) -> str:
        """One line about the source for the log; empty if there is nothing to report."""
