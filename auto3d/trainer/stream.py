"""Datasets without positions, such as torch's IterableDataset or a streamed ``datasets`` one.

Every rank reads the whole stream, in its order, and keeps what may still be asked for. What a stream draws at random
follows from the seed and the sample, as ranks ask at different times.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch.utils.data import IterableDataset

from auto3d.data.drawing import drawing
from auto3d.errors import InputError

_END = object()


def is_stream(dataset: Any) -> bool:
    """Whether its samples come one after the other and have no positions."""
    return isinstance(dataset, IterableDataset)


def check_readable(dataset: Any, name: str) -> None:
    """Raise InputError for a dataset, or for one of several in a dict, that neither is a stream nor has a length."""
    for part in dataset.values() if isinstance(dataset, dict) else [dataset]:
        if part is not None and not hasattr(part, "__len__") and not is_stream(part):
            raise InputError(
                f"Trainer: {name} has no length, so that ranks could not load different samples of it; give a "
                "dataset with __len__ and __getitem__, or an IterableDataset"
            )


def check_stream(dataset: Any, args: Any) -> None:
    """Raise InputError unless a training by ``args`` takes the same samples of the stream as in one process."""
    if hasattr(dataset, "__len__"):
        raise InputError(
            "train_dataset: an IterableDataset with a length, whose last batch may be smaller; leave out __len__ and "
            "give TrainingArguments.max_steps, or give it __getitem__"
        )
    if args.max_steps <= 0:
        raise InputError(
            "TrainingArguments.max_steps: train_dataset is a stream, whose length is not known; give the number of "
            "steps to train"
        )
    if args.dataloader_num_workers:
        raise InputError(
            f"TrainingArguments.dataloader_num_workers: found {args.dataloader_num_workers}, and train_dataset is a "
            "stream: each worker would read it whole, or a share of it whose last batch may be smaller, in the middle "
            "of an epoch; use 0"
        )


def read_whole(dataset: Any, seed: int) -> list[Any]:
    """All samples of a stream, as an evaluation takes them."""
    return _Pass(dataset, seed, 0).take(None)


class _Pass:
    """A pass over a stream. What is drawn for a sample follows from the seed, the epoch and its number."""

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self._seed, self._number = (seed, epoch), 0
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        with drawing() as begin:
            begin(*self._seed, 0)
            self._samples = iter(dataset)

    def take(self, count: int | None) -> list[Any]:
        """The next ``count`` samples (None: all), or those that are left."""
        taken: list[Any] = []
        with drawing() as begin:
            while count is None or len(taken) < count:
                self._number += 1
                begin(*self._seed, self._number)
                if (sample := next(self._samples, _END)) is _END:
                    break
                taken.append(sample)
        return taken


def numbers_in(holder: Any) -> dict[str, float]:
    """The numbers that an object of the script holds as attributes."""
    return {name: value for name, value in getattr(holder, "__dict__", {}).items() if type(value) in (int, float)}


class Stream:
    """The samples of a stream that a training takes, by their number in it, and which of them are in a step.

    A pass over the stream is an epoch, of whole global batches: what remains at its end is left out, and ``tell`` gets
    a line that says so. The first global batch and those since ``forget`` are kept. A thread that reads ahead asks too.
    """

    def __init__(self, dataset: Any, *, global_batch: int, seed: int, tell: Callable[[str], None]) -> None:
        self._dataset, self._global_batch, self._seed, self._tell = dataset, global_batch, seed, tell
        self._batches: dict[int, list[Any]] = {}  # iteration -> samples
        self._begun = [(0, 0)]  # (iteration, epoch that it begins)
        self._passing: _Pass | None = None
        self._kept = 0  # iterations before it are not asked for again, but for the first
        self._failure: Exception | None = None  # what the stream has raised
        self._numbers = numbers_in(dataset)  # after the last read, which may change them
        self._changed = ""
        self._drawing = Lock()

    def of(self, iteration: int) -> Sequence[int]:
        """The numbers of the samples of ``iteration``."""
        return range(iteration * self._global_batch, (iteration + 1) * self._global_batch)

    def place(self, iteration: int) -> tuple[int, int]:
        """(epoch, number in it) of ``iteration``, up to which it reads."""
        with self._reading():
            self._read_to(iteration)
            first, epoch = next(begun for begun in reversed(self._begun) if begun[0] <= iteration)
        return epoch, iteration - first

    def begin(self, epoch: int, iteration: int) -> None:
        """Let ``iteration`` be the first of ``epoch``: read the stream anew from there."""
        with self._reading():
            self._begun = [begun for begun in self._begun if begun[0] < iteration] + [(iteration, epoch)]
            self._batches = {number: batch for number, batch in self._batches.items() if number < iteration}
            self._passing = _Pass(self._dataset, self._seed, epoch)

    def forget(self, before: int) -> None:
        """Keep no samples of iterations ``before`` this one."""
        with self._reading():
            self._kept = before
            self._drop()

    def take_change(self) -> str:
        """The name of an attribute, a number, that others than a read have changed since the last call, or nothing."""
        with self._reading():
            changed, self._changed = self._changed, ""
        return changed

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        with self._reading():
            self._read_to(max(numbers) // self._global_batch)
            return [self._batches[number // self._global_batch][number % self._global_batch] for number in numbers]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._drawing:
            now = numbers_in(self._dataset)
            self._changed = next(
                (name for name in now if now[name] != self._numbers.get(name, now[name])), self._changed
            )
            try:
                yield
            finally:
                self._numbers = numbers_in(self._dataset)

    def _read_to(self, iteration: int) -> None:
        if self._failure is not None:
            raise self._failure
        while (number := max(self._batches, default=-1) + 1) <= iteration:
            self._batches[number] = self._next_batch(number)
            self._drop()

    def _drop(self) -> None:
        newest = max(self._batches, default=0)
        self._batches = {
            number: batch for number, batch in self._batches.items() if number in (0, newest) or number >= self._kept
        }

    def _next_batch(self, iteration: int) -> list[Any]:
        """The samples of ``iteration``, where the next pass begins if this one has too few."""
        if self._passing is None:
            self._passing = _Pass(self._dataset, self._seed, 0)
        samples = self._whole_batch()
        if samples is not None:
            return samples
        begun, epoch = self._begun[-1]
        if begun < iteration:
            self._begun.append((iteration, epoch + 1))
            self._passing = _Pass(self._dataset, self._seed, epoch + 1)
            samples = self._whole_batch()
        if samples is None:
            raise InputError(
                f"train_dataset: its stream has fewer samples than a global batch of {self._global_batch} "
                "(per_device_train_batch_size × gradient_accumulation_steps × pipelines); give more samples, or "
                "smaller batches"
            )
        return samples

    def _whole_batch(self) -> list[Any] | None:
        assert self._passing is not None
        try:
            samples = self._passing.take(self._global_batch)
        except Exception as error:  # the script's code can raise anything; after it, the pass looks as if it had ended
            self._failure = error
            raise
        if len(samples) == self._global_batch:
            return samples
        if samples:
            self._tell(
                f"train_dataset: the stream ended, and its last samples, {len(samples)} of the "
                f"{self._global_batch} of a global batch, are in no step of this epoch"
            )
        return None
