"""What one transformers process draws as it reads: each batch from the states in which the one before left generators.

Its data loader draws a seed for workers at the begin of an epoch and of an evaluation, then perhaps the order, and then
fetches and collates batch after batch: one ahead of the step that trains it, so before an evaluation between two steps
(transformers.Trainer._run_epoch, accelerate's DataLoaderShard, torch's _BaseDataLoaderIter). A rank that reads goes
through all of this and keeps its own micro-batches, for a thread that reads ahead too.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from auto3d.trainer.generators import LOCK, PROCESS, Generators, States

Batch = dict[str, torch.Tensor]
_FILE = "draws.json"  # in a checkpoint
_ENDED = object()
_KEPT = 16  # iterations whose begin is known; a thread reads ahead by fewer


class DrawnData(Protocol):
    """Data whose batches are drawn one after the other; a CollatedData is one."""

    @property
    def generators(self) -> Generators: ...

    @property
    def order(self) -> Any: ...

    def collate_now(self, samples: Sequence[int]) -> Batch: ...

    def padded(self, batch: Batch) -> Batch: ...


class OrderOfEpochs(Protocol):
    """The order of a training's samples, of which it says the epochs; a TrainOrder is one."""

    draws: "TrainingDraws | None"

    def of(self, iteration: int) -> Sequence[int]: ...

    def place(self, iteration: int) -> tuple[int, int]: ...

    def after(self, iteration: int, states: States) -> States: ...


def draw_seed_of_workers(generator: torch.Generator | None = None) -> None:
    """As torch's iterator of a DataLoader does before it asks a sampler; None: from torch's own generator."""
    torch.empty((), dtype=torch.int64).random_(generator=generator)


@dataclass(frozen=True)
class Point:
    """Between two iterations, before any evaluation there."""

    states: States
    ahead: States | None = None  # before the first batch of the next iteration; None: it begins an epoch
    epoch: States | None = None  # before the epoch in which it is


class TrainingDraws:
    """The draws of a training whose samples are in ``order``, from ``states`` on.

    Without ``reads_ahead``, no batch is read before the step that trains it: a plain DataLoader of the script.
    Its data draw nothing until ``follow`` is called with them; ``is_on`` says whether anything is drawn but orders.
    """

    def __init__(self, order: OrderOfEpochs, states: States, *, reads_ahead: bool = True) -> None:
        self.is_on, self._reads_ahead = False, reads_ahead
        self.size = 1  # samples of a micro-batch
        self.order = order
        self._data: DrawnData | None = None
        self._points = {0: Point(states)}
        self._evaluations: dict[int, list[EvaluationDraws]] = {}  # after so many iterations
        self._cut: dict[int, Sequence[int]] = {}  # iteration -> samples of the batch that was read in its place
        self._running: Iterator[None] = iter(())
        self._number = -1  # iteration that runs
        self._kept: dict[tuple[int, int], Batch] = {}  # (iteration, batch of it)
        self._asked: set[int] = set()  # batches of an iteration that this rank reads
        self._epochs: dict[int, States] = {}  # first iteration -> states before the epoch
        order.draws = self

    def follow(self, data: DrawnData | None, own: States) -> None:
        """Draw the batches of ``data``; None: worker processes draw them, from the states before their epoch.

        A script's ``own`` generators begin at their states in there.
        """
        self._data, self.is_on = data, True
        first = self._points[0]
        self._points[0] = replace(first, states=replace(first.states, own=own.own))

    def go_on(self, iteration: int, point: Point | None) -> None:
        """Begin after ``iteration`` iterations, at what was written there; None: as at the start."""
        if point is None:
            states = self._points[0].states
            is_ahead = self._reads_ahead and self.order.place(iteration)[1]
            point = Point(_with_seed_of_workers(states), states if is_ahead else None)
        self._points = {iteration: point}
        if point.epoch is not None and self.order.place(iteration)[1]:
            self._epochs[iteration - self.order.place(iteration)[1]] = point.epoch

    def read(self, place: tuple[int, int], samples: range) -> Batch:
        """The batch at this ``place``, (iteration, number in it), as the collator makes it."""
        iteration, index = place
        with LOCK:
            self._asked.add(index)
            if place not in self._kept:
                self._reach(iteration)
                if self._number != iteration:
                    self._start(iteration)
            while place not in self._kept:
                if next(self._running, _ENDED) is _ENDED:
                    self._start(iteration)
            return self._kept[place]

    def point(self, iteration: int) -> Point:
        """The states after ``iteration`` iterations and all evaluations there."""
        with LOCK:
            self._reach(iteration)
            return replace(self._points[iteration], states=self._states(iteration))

    def before_epoch(self, iteration: int) -> States | None:
        """The states before the epoch that begins with ``iteration``; None if they are not known any more."""
        with LOCK:
            if iteration in self._epochs:
                return self._epochs[iteration]
            if iteration < min(self._points):
                return None
            self._reach(iteration)
            return self._states(iteration)

    def evaluate(self, data: DrawnData | None, iteration: int, size: int) -> "EvaluationDraws":
        """The draws of an evaluation after ``iteration`` iterations, of ``data`` in batches of ``size`` samples.

        None: its data draw nothing.
        """
        with LOCK:
            there = self._evaluations.setdefault(iteration, [])
            number = len(there)

            def begin() -> States:
                if number:
                    return there[number - 1].end()
                self._reach(iteration)
                return self._points[iteration].states

            made = EvaluationDraws(data, size, begin)
            there.append(made)
            self.is_on = self.is_on or data is not None
            self.read_anew(iteration)
        return made

    def read_anew(self, iteration: int) -> None:
        """Forget what was drawn in ``iteration`` and later, before which something else comes."""
        with LOCK:
            self._points = {number: point for number, point in self._points.items() if number <= iteration}
            if self._number >= iteration:
                self._running, self._number = iter(()), -1
            is_ahead = iteration in self._points and self._points[iteration].ahead is not None
            self._kept = {
                place: batch
                for place, batch in self._kept.items()
                if place[0] < iteration or (is_ahead and place == (iteration, 0))
            }

    def end_epoch(self, iteration: int) -> None:
        """End the epoch before ``iteration``, with which another begins: one batch was read ahead in vain."""
        with LOCK:
            if self._reads_ahead and self.order.place(iteration)[1]:
                self._cut[iteration] = self._batches(iteration)[0]
            if (point := self._points.get(iteration)) is not None:
                self._points[iteration] = replace(point, ahead=None)
            self.read_anew(iteration)

    def _states(self, iteration: int) -> States:
        there = self._evaluations.get(iteration)
        return there[-1].end() if there else self._points[iteration].states

    def _reach(self, iteration: int) -> None:
        """Go on until it is known in which states ``iteration`` begins."""
        while iteration not in self._points:
            last = max(number for number in self._points if number < iteration)
            if self._number != last:
                self._start(last)
            for _ in self._running:
                pass

    def _start(self, iteration: int) -> None:
        self._running, self._number = self._run(iteration), iteration

    def _run(self, iteration: int) -> Iterator[None]:
        """Draw ``iteration``, and one batch ahead."""
        point, states = self._points[iteration], self._states(iteration)
        epoch, batches = point.epoch, self._batches(iteration)
        self._kept = {
            place: batch
            for place, batch in self._kept.items()
            if place[0] >= iteration or (place[0] == iteration - 1 and place[1] in self._asked)
        }
        if self.order.place(iteration)[1] == 0:
            epoch = self._epochs[iteration] = states
            states = self.order.after(iteration, states)
            states = self._draw(iteration, 0, batches[0], states)
        elif not self._reads_ahead:
            states = self._draw(iteration, 0, batches[0], states)
        elif (iteration, 0) not in self._kept:
            assert point.ahead is not None
            self._draw(iteration, 0, batches[0], point.ahead)
        yield
        for index, samples in enumerate(batches[1:], 1):
            states = self._draw(iteration, index, samples, states)
            yield
        following, ahead = iteration + 1, None
        if following in self._cut:
            ahead, states = states, self._draw(following, -1, self._cut[following], states)
        elif self._reads_ahead and self.order.place(following)[1]:
            ahead, states = states, self._draw(following, 0, self._batches(following)[0], states)
        self._points[following] = Point(states, ahead, epoch)
        for known in (self._points, self._epochs, self._evaluations):
            for number in [old for old in known if old <= following - _KEPT]:
                del known[number]

    def _draw(self, iteration: int, index: int, samples: Sequence[int], states: States) -> States:
        """The states after a batch of ``samples``, which is kept."""
        if self._data is None:
            return states
        self._kept[iteration, index], states = _drawn(self._data, samples, states)
        return states

    def _batches(self, iteration: int) -> list[Sequence[int]]:
        samples = self.order.of(iteration)
        return [samples[first : first + self.size] for first in range(0, len(samples), self.size)]


class EvaluationDraws:
    """The draws of an evaluation of ``data`` in batches of ``size`` samples, in the states that ``begin`` gives.

    Without ``data`` nothing is drawn here but the seed of workers.
    """

    def __init__(self, data: DrawnData | None, size: int, begin: Callable[[], States]) -> None:
        self._data, self._size, self._begin = data, size, begin
        self._states: States | None = None  # before batch number ``_next``
        self._next = 0
        self._end: States | None = None
        self._kept: dict[int, Batch] = {}

    def read(self, place: tuple[int, int], samples: range) -> Batch:
        """The samples of these numbers, padded."""
        with LOCK:
            return cut_from_batches(samples, self._size, self._batch)

    def begin(self) -> States:
        """The states before the evaluation."""
        return self._begin()

    def end(self) -> States:
        """The states after the evaluation."""
        with LOCK:
            if self._end is None and self._data is not None:  # a thread may ask while batches are still read
                self._batch(-(-self._data.order.samples // self._size) - 1)
                self._end = self._states
            elif self._end is None:
                self._end = _with_seed_of_workers(self._begin())
            assert self._end is not None
            return self._end

    def _batch(self, number: int) -> Batch:
        data: Any = self._data
        if self._states is None or (number < self._next and number not in self._kept):
            self._states, self._next = _with_seed_of_workers(self._begin()), 0
        while self._next <= number:
            first = self._next * self._size
            batch, self._states = _drawn(data, data.order.between(first, first + self._size), self._states)
            self._kept[self._next] = data.padded(batch)
            self._next += 1
        most = 2 * data.order.global_batch // self._size + 2
        self._kept = {place: batch for place, batch in self._kept.items() if place > number - most}
        return self._kept[number]


def cut_from_batches(samples: range, size: int, batch: Callable[[int], Batch]) -> Batch:
    """The samples of these numbers, from the batches of ``size`` samples that have them, by their numbers."""
    parts: list[Batch] = []
    for number in range(samples.start // size, -(-samples.stop // size)):
        first = number * size
        own = slice(max(samples.start - first, 0), samples.stop - first)
        parts.append({name: value[own] for name, value in batch(number).items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def write_draws(folder: Path, point: Point) -> None:
    """Write ``point`` into the checkpoint in ``folder``."""
    content = {name: None if states is None else states.to_json() for name, states in vars(point).items()}
    (folder / _FILE).write_text(json.dumps(content))


def read_draws(folder: Path) -> Point | None:
    """The Point of the checkpoint in ``folder``; None if it has none."""
    if not (folder / _FILE).exists():
        return None
    content = json.loads((folder / _FILE).read_text())
    ahead, epoch = (None if (text := content[name]) is None else States.from_json(text) for name in ("ahead", "epoch"))
    return Point(States.from_json(content["states"]), ahead, epoch)


def _with_seed_of_workers(states: States) -> States:
    with PROCESS.at(states):
        draw_seed_of_workers()
        return PROCESS.states(states)


def _drawn(data: DrawnData, samples: Sequence[int], states: States) -> tuple[Batch, States]:
    """A batch of ``samples``, and the states after it was drawn from ``states`` on."""
    generators: Generators = data.generators
    with generators.at(states):
        batch = data.collate_now(samples)
        return batch, generators.states(states)
