"""Compares what ranks have read: of a sample, all of them must have read the same.

Where two stages of a pipeline did not, they would get a sample and the label of another sample. Pipelines read
different samples, so a rank also reads what the next does: where that differs, they would number labels otherwise,
take samples in another order, and train some twice, or train a changed file. Training would go on without an error.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from auto3d.data import TrainingData
from auto3d.data.fingerprint import MODULUS, total
from auto3d.errors import InputError
from auto3d.runtime.layout import RankLayout
from auto3d.runtime.waiting import waiting_for

CAUSE = (
    "each rank reads by itself, so what it reads must follow from the position of a sample alone: seed whatever draws "
    "at random, sort what comes from a set or a folder, tell all ranks the same epoch, and change no file during the "
    "training"
)


_OF_NEIGHBOURS = 0x9E3779B1
"""Factor of what neighbours compare. It is larger than any ``Readers.factor``, so that no part of the factors of
all who read a sample sums up to 0: some readers with the same wrong sample are found. It is odd, to lose no bit."""


class SamplesDifferError(InputError):
    """Ranks have read different data for the same sample."""


@dataclass(frozen=True, kw_only=True)
class Readers:
    """Who reads each micro-batch of a pipeline: some stages, on each shard of a tensor-parallel group.

    If samples are ``read_once``, stage 0 does, and now and then (``is_compared``) one stage of each other device, which
    has received the inputs, reads them too, only to compare: a script must not train each rank on a part of its own.
    A ``Neighbour`` reads them as well, what its ``neighbour_stage`` reads: a stage on most replicas.
    """

    stages: tuple[int, ...]  # stages that read something with fingerprints
    read_once: bool
    shard: int
    shards: int
    first_sample: int  # first sample of this rank's slice of each micro-batch
    samples: int  # samples of a micro-batch
    replicas: int  # replicas of the stages of this rank
    neighbour_stage: int | None  # None: nothing is read

    @classmethod
    def of(cls, layout: RankLayout, data: TrainingData) -> "Readers":
        stages = tuple(stage.index for stage in layout.model_stages if data.reads(stage.inputs))
        if layout.read_once:
            of_devices: dict[int, int] = {}
            for stage, _ in sorted(layout.schedule.device_of):
                of_devices.setdefault(layout.schedule.device_of[stage, 0], stage)
            stages = tuple(sorted(of_devices.values()))
        # The last stage waits for the others after its last backward, under most schedules. If samples are read once,
        # only stage 0 has fingerprints in each iteration.
        by_wait = stages if layout.read_once else stages[::-1]
        of_most = max(by_wait, key=lambda stage: layout.plan.stages[stage].replicas, default=None)
        return cls(
            stages=stages,
            read_once=layout.read_once,
            shard=layout.shard,
            shards=layout.plan.tp,
            first_sample=layout.replica * (layout.samples // layout.replicas),
            samples=layout.samples,
            replicas=layout.replicas,
            neighbour_stage=of_most,
        )

    @property
    def are_several(self) -> bool:
        """Whether a sample that a pipeline trains is read by several readers of it."""
        return len(self.stages) * self.shards > 1

    def first(self, micro_batch: int, replica: int | None = None) -> int:
        """The number in the global batch of the first sample that a ``replica``, None: this rank, reads of
        ``micro_batch``."""
        of_replica = self.first_sample if replica is None else replica * (self.samples // self.replicas)
        return micro_batch * self.samples + of_replica

    def factor(self, stage: int) -> int:
        """Factor of what ``stage`` reads on this rank; the factors of all readers of a micro-batch sum up to 0."""
        others = len(self.stages) * self.shards - 1
        return others if (stage, self.shard) == (self.stages[0], 0) else -1


class SameSamples:
    """The fingerprints of what this rank has read, until the fingerprints of an iteration are known to agree.

    Each rank adds a number to a sum over all ranks that goes anyway: the fingerprints that it has read, each with a
    weight of its place and times ``Readers.factor``, modulo MODULUS; neighbours add what they compare, and subtract it.
    The sum is 0 modulo MODULUS if all readers agree about each sample; if they do not, it is with a probability of
    about 1 / MODULUS.
    """

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._read: defaultdict[int, dict[tuple[int, int], np.ndarray]] = defaultdict(dict)
        self._neighbours: defaultdict[int, list[tuple[int, np.ndarray, int]]] = defaultdict(list)
        """Of each iteration: first sample, fingerprints, and 1 of its own, −1 of its neighbour's."""

    def reads(self, stage: int) -> bool:
        """Whether what ``stage`` reads may be compared."""
        return stage in self._readers.stages

    def compares(self, is_due: bool) -> bool:
        """Whether the readers of a pipeline compare an iteration in which comparisons may be due."""
        return self._readers.are_several and (is_due or not self._readers.read_once)

    def note(self, iteration: int, micro_batch: int, stage: int, fingerprints: np.ndarray | None) -> None:
        """Note what ``stage`` has read of ``micro_batch`` of the global batch."""
        if fingerprints is not None:
            self._read[iteration][stage, micro_batch] = fingerprints

    def note_other(
        self,
        iteration: int,
        micro_batch: int,
        mine: np.ndarray | None,
        other: tuple[int, int],
        fingerprints: np.ndarray | None,
    ) -> None:
        """Note what this rank has read of ``micro_batch``, and of ``other``, a (micro-batch, replica) of its neighbour.

        It is the neighbour of a rank that does so too: both in the same iterations and at the same places, so that the
        two sides of each comparison cancel.
        """
        if mine is not None and fingerprints is not None:
            first = self._readers.first
            self._neighbours[iteration] += [(first(micro_batch), mine, 1), (first(*other), fingerprints, -1)]

    def share(self, iteration: int) -> int:
        """What this rank adds to the sum of ``iteration``."""
        readers, read = self._readers, self._read.get(iteration, {})
        share = sum(readers.factor(stage) * self._total(number, values) for (stage, number), values in read.items())
        neighbours = sum(sign * total(values, first) for first, values, sign in self._neighbours.get(iteration, ()))
        share += _OF_NEIGHBOURS * neighbours
        return share % MODULUS

    def _total(self, micro_batch: int, fingerprints: np.ndarray) -> int:
        return total(fingerprints, self._readers.first(micro_batch))

    def check(self, iteration: int, sum_of_shares: float, *, where: str, together: bool = False) -> None:
        """Raise SamplesDifferError, on every rank, if the ``sum_of_shares`` of all ranks says that readers disagree.

        The error says ``where``. With ``together``, for which all ranks must be at the end of the same iteration, it
        names the sample.
        """
        first = self._readers.first
        read = [(first(number), values) for (_, number), values in self._read.pop(iteration, {}).items()]
        read += [(first_sample, values) for first_sample, values, _ in self._neighbours.pop(iteration, ())]
        if sum_of_shares % MODULUS == 0:
            return
        what = self._difference(read) if together else "ranks have read different data"
        raise SamplesDifferError(f"{where}: {what}; {CAUSE}")

    def _difference(self, read: Sequence[tuple[int, np.ndarray]]) -> str:
        mine = [(sample, int(number)) for first, values in read for sample, number in enumerate(values, start=first)]
        of_ranks: list[Sequence[tuple[int, int]]] = [()] * dist.get_world_size()
        with waiting_for("what all ranks have read"):
            dist.all_gather_object(of_ranks, mine)
        return _first_difference(of_ranks)


def _first_difference(of_ranks: Sequence[Sequence[tuple[int, int]]]) -> str:
    """In words, the first sample that two ranks have read differently; ``of_ranks`` has (sample, fingerprint) pairs."""
    seen: dict[int, dict[int, int]] = defaultdict(dict)  # sample -> fingerprint -> the first rank that has it
    for rank, pairs in enumerate(of_ranks):
        for sample, number in pairs:
            seen[sample].setdefault(number, rank)
    differs = [sample for sample, numbers in seen.items() if len(numbers) > 1]
    if not differs:
        return "not all ranks have read as many samples"
    sample = min(differs)
    reader, other, *_ = sorted(seen[sample].values())
    who = f"rank {reader} has" if reader == other else f"ranks {reader} and {other} have"
    return f"{who} read different data for sample {sample} of the global batch"
