"""Which batches worker processes read ahead for a rank, and what is drawn for them.

Where data draw nothing, a rank's workers read its own micro-batches. Where they draw, worker ``i % n`` of each reading
rank has batch ``i`` of all pipelines, with the generators that it has in one transformers process.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch

from auto3d.data import BatchSlice
from auto3d.trainer.draws import Batch, DrawnData, TrainingDraws, cut_from_batches
from auto3d.trainer.generators import LOCK, States
from auto3d.trainer.rank_zero import tell
from auto3d.trainer.workers import Passes, ReadAhead, Task, Workers

Read = tuple[Batch, np.ndarray | None]
"""A padded batch, and the fingerprints of its samples; None where data draw, of which processes compare other draws."""


class AheadData(DrawnData, Protocol):
    """Data that workers read; a CollatedData is one."""

    @property
    def dataset(self) -> Any: ...

    def padded(self, batch: Batch, length: int | None = None) -> Batch: ...

    def read(self, samples: Sequence[int], seed: Sequence[int], *, fingerprints: bool, length: int | None) -> Read: ...

    def length_at(self, iteration: int, index: int) -> int | None: ...


class Ahead(ABC):
    """Micro-batches that worker processes read ahead."""

    def __init__(self, workers: Workers) -> None:
        self._workers, self._passes = workers, Passes()

    @abstractmethod
    def read(self, data: AheadData, part: BatchSlice, iteration: int, index: int) -> Read:
        """Micro-batch ``index`` of the global batch, which has samples; one that the rank runs, unless data draw."""

    def read_anew(self, iteration: int) -> None:
        """Forget what was read for ``iteration`` and later, before which something else comes."""
        self._passes.forget()

    def end(self) -> None:
        """End the workers."""
        self._passes.end()


class PlacedAhead(Ahead):
    """The micro-batches that a rank runs. What a batch draws follows from its place."""

    def read(self, data: AheadData, part: BatchSlice, iteration: int, index: int) -> Read:
        own, size, (epoch, place) = part.micro_batches, part.micro_batch_size, data.order.place(iteration)
        first = iteration - place

        def tasks(number: int) -> Iterator[Task]:
            later, skipped = divmod(number, len(own))
            for following in count(first + later):
                samples = data.order.of(following) if data.order.place(following)[0] == epoch else ()
                if not samples:
                    return
                for micro_batch in own[skipped:]:
                    if taken := samples[micro_batch * size : (micro_batch + 1) * size]:
                        options = {"fingerprints": part.read_once, "length": data.length_at(following, micro_batch)}
                        yield taken, {"seed": [following, micro_batch], **options}
                skipped = 0

        def start(number: int) -> ReadAhead:
            drawn = torch.Generator().manual_seed(0)
            with LOCK:  # workers have the lock as this thread has it
                return ReadAhead(data.dataset, data.read, tasks(number), self._workers, tell, drawn)

        number = place * len(own) + index - own.start
        key = first, part, *data.order.of(first)[:1]  # an evaluation may run its last samples in other micro-batches
        read: Read = self._passes.get(key, number, start, keep=len(own))
        return read


class TrainingAhead(Ahead):
    """The batches of a training whose data draw, in the states of ``draws``."""

    def __init__(self, draws: TrainingDraws, workers: Workers) -> None:
        super().__init__(workers)
        self._draws = draws
        self._begun: tuple[int, States] | None = None  # first iteration of the epoch, and the states before it

    def read(self, data: AheadData, part: BatchSlice, iteration: int, index: int) -> Read:
        size, (epoch, place) = part.micro_batch_size, data.order.place(iteration)
        first, per_iteration = iteration - place, part.global_batch // part.micro_batch_size

        def tasks() -> Iterator[Task]:
            for later in count(first):
                if data.order.place(later)[0] != epoch:
                    return
                samples = data.order.of(later)
                yield from ((samples[begin : begin + size], {}) for begin in range(0, len(samples), size))

        def start(_: int) -> ReadAhead:
            if self._begun is None or self._begun[0] != first:
                states = self._draws.before_epoch(first) or self._draws.point(iteration).states
                self._begun = first, states
            return _started(data, self._begun[1], tasks(), self._workers)

        batch = self._passes.get(first, place * per_iteration + index, start, keep=per_iteration, from_begin=True)
        return data.padded(batch, data.length_at(iteration, index)), None

    def read_anew(self, iteration: int) -> None:
        if self._begun is not None and self._begun[0] >= iteration:
            self._begun = None
            self._passes.forget()


class EvaluationAhead(Ahead):
    """The batches of an evaluation whose data draw, of ``size`` samples, in the states that ``begin`` gives."""

    def __init__(self, begin: Callable[[], States], size: int, workers: Workers) -> None:
        super().__init__(workers)
        self._begin, self._size = begin, size

    def read(self, data: AheadData, part: BatchSlice, iteration: int, index: int) -> Read:
        order, size = data.order, self._size
        first = order.number(iteration) + index * part.micro_batch_size
        samples = range(first, min(first + part.micro_batch_size, order.samples))

        def start(_: int) -> ReadAhead:
            tasks: Iterator[Task] = (
                (order.between(begin, begin + size), {}) for begin in range(0, order.samples, size)
            )
            return _started(data, self._begin(), tasks, self._workers)

        keep = 2 * order.global_batch // size + 2

        def batch(number: int) -> Batch:
            return data.padded(self._passes.get(0, number, start, keep=keep, from_begin=True))

        return cut_from_batches(samples, size, batch), None

    def read_anew(self, iteration: int) -> None:
        """Nothing: nothing comes between the batches of an evaluation."""


def _started(data: AheadData, states: States, tasks: Iterable[Task], workers: Workers) -> ReadAhead:
    """Workers that collate ``tasks``, whose generators follow from ``states``."""
    with data.generators.at(states):
        return ReadAhead(data.dataset, data.collate_now, tasks, workers, tell)
