"""The inputs of a rank's micro-batches, by their numbers in the program that runs."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch

from auto3d.data import MicroBatches
from auto3d.partition.stage import Stage
from auto3d.runtime.samples.loading import Loader, Need, is_compared, needs_of, pinned_memory_of
from auto3d.runtime.samples.neighbours import Neighbour, compared
from auto3d.runtime.samples.same_samples import SameSamples
from auto3d.schedule.program import PipeStage, Program


class MicroBatchInputs:
    """Loads what a rank's forwards take from the data.

    In each iteration a rank runs ``micro_batches`` micro-batches of the global batch, from number
    ``first_micro_batch`` on. A program counts its micro-batches on through its iterations. If it runs them in
    ``slices`` of the sequence, it counts these, and so do both numbers; every slice takes the inputs of all. ``same``
    compares what it reads with what other ranks read; None: nobody does. For that it also reads of what ``neighbour``
    reads, as ``neighbours.compared`` says; a ``cost_us`` that is a function is called at the start, to measure it.
    Comparisons are due where ``is_compared`` says so, and where an iteration ``begins_epoch``. What ``counting_stage``
    reads says how many targets a micro-batch has: only one rank of a tensor-parallel group or of replicas counts them.
    ``largest`` is as in a Loader.
    """

    def __init__(
        self,
        batches: MicroBatches,
        *,
        first_micro_batch: int,
        micro_batches: int,
        slices: int = 1,
        device: torch.device,
        same: SameSamples | None = None,
        neighbour: Neighbour | None = None,
        cost_us: Callable[[Callable[[int], object] | None], int] | int = 0,
        begins_epoch: Callable[[int], bool] = lambda _: False,
        counting_stage: int | None = None,
        largest: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.micro_batches = micro_batches
        self._slices = slices
        memory = pinned_memory_of(device)
        self._prefetches = memory is not None
        self._batches, self._loader = batches, Loader(batches, memory, largest)
        self._first_micro_batch = first_micro_batch
        self._first_iteration = 0
        self._begin: int | None = None  # first iteration of the first program
        self._same, self._neighbour, self._is_complete = same, neighbour, True
        self._mine: defaultdict[int, dict[int, np.ndarray | None]] = defaultdict(dict)
        """Iteration -> micro-batch -> fingerprints to compare with the neighbour's."""
        self._cost_us = cost_us
        self._begins_epoch = begins_epoch
        self._counting_stage = counting_stage
        self._items: defaultdict[int, dict[int, int]] = defaultdict(dict)  # iteration -> micro-batch -> its targets

    def start(
        self,
        program: Program,
        inputs_of: Mapping[PipeStage, Collection[str]],
        first_iteration: int,
        *,
        is_complete: bool = True,
    ) -> None:
        """Begin ``program`` with iteration ``first_iteration``; ``inputs_of`` names the inputs of each stage.

        Pipelines compare nothing where a global batch is not ``is_complete``: the other may have no micro-batch.
        """
        self._first_iteration, self._is_complete = first_iteration, is_complete
        if self._begin is None:
            self._begin = first_iteration
        if not isinstance(self._cost_us, int):
            self._cost_us = self._cost_us(None if self._neighbour is None else self._read_of_neighbour)
        if not self._prefetches:
            return
        needs = needs_of(
            program,
            inputs_of,
            first_iteration=first_iteration,
            first_micro_batch=self._first_micro_batch,
            micro_batches=self.micro_batches,
            slices=self._slices,
            neighbour=self._neighbour if is_complete else None,
        )
        self._loader.start(needs, program.iterations, self._compares)

    def end(self) -> None:
        """End the loading, and forget what it has read ahead; another program begins it again."""
        self._loader.end()

    def of(self, micro_batch: int, stage: Stage) -> dict[str, torch.Tensor]:
        """The inputs of ``stage`` in the program's ``micro_batch``, on the device; each [samples, *shape]."""
        later, index = divmod(micro_batch, self.micro_batches)
        number = (self._first_micro_batch + index) // self._slices
        iteration = self._first_iteration + later
        same = self._same if self._same is not None and self._same.reads(stage.index) else None
        compares = same is not None and same.compares(self._is_due(iteration))
        with_neighbour = same is not None and self._compares_with_neighbour(iteration, index, stage.index)
        if not (stage.inputs or compares):
            return {}
        reading = self._loader.read(iteration, number, stage.inputs, compared=compares or with_neighbour)
        if same is not None and compares:
            same.note(iteration, number, stage.index, reading.fingerprints)
        if with_neighbour:
            self._mine[iteration][number] = reading.fingerprints
        if reading.items is not None and stage.index == self._counting_stage:
            self._items[iteration][number] = reading.items
        return reading.inputs

    def _is_due(self, iteration: int) -> bool:
        return is_compared(iteration, self._begin or 0) or self._begins_epoch(iteration)

    def _compares_with_neighbour(self, iteration: int, index: int, stage: int) -> bool:
        neighbour, (place, later_slice) = self._neighbour, divmod(index, self._slices)
        if neighbour is None or stage != neighbour.stage or later_slice or not self._is_complete:
            return False
        return place in self._of_neighbour(iteration)

    def _of_neighbour(self, iteration: int) -> Collection[int]:
        assert isinstance(self._cost_us, int), "start() measures it"
        due, micro_batches = self._is_due(iteration), self.micro_batches // self._slices
        return compared(iteration, micro_batches=micro_batches, cost_us=self._cost_us, is_due=due)

    def _compares(self, need: Need) -> bool:
        if self._neighbour is not None:
            place = need.index % (self.micro_batches // self._slices)
            if place in self._of_neighbour(need.iteration):
                return True
        return bool(need.names) and self._same is not None and self._same.compares(self._is_due(need.iteration))

    def _read_of_neighbour(self, number: int) -> None:
        assert self._neighbour is not None
        index = self._neighbour.first + number % (self.micro_batches // self._slices)
        self._batches.fingerprints(self._first_iteration, index, self._neighbour.replica)

    def take_items(self, iteration: int) -> int:
        """The number of targets that the data says of the micro-batches of ``iteration`` that this rank counts."""
        return sum(self._items.pop(iteration, {}).values())

    def share(self, iteration: int) -> int:
        """What this rank adds to the sum by which all ranks compare what they have read in ``iteration``.

        It first reads what it compares of its neighbour, all at once: a reading between two passes finds cold caches,
        and delays the next stage.
        """
        if self._same is None:
            return 0
        for number, mine in self._mine.pop(iteration, {}).items():  # in the order of forwards, as they are read ahead
            assert self._neighbour is not None
            place = number - self._first_micro_batch // self._slices
            other = self._neighbour.first + place, self._neighbour.replica
            self._same.note_other(iteration, number, mine, other, self._loader.fingerprints(iteration, *other))
        return self._same.share(iteration)

    def check(self, iteration: int, total: float, *, where: str, together: bool = False) -> None:
        """Raise InputError if that sum says that ranks have read different data; see ``SameSamples.check``."""
        if self._same is not None:
            self._same.check(iteration, total, where=where, together=together)
