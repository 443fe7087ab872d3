"""Who draws and who reads ahead: what a Trainer reads, in the sequence in which one transformers process reads it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard

from auto3d.errors import InputError
from auto3d.runtime.messages.gathered import of_all_ranks
from auto3d.trainer.ahead import Ahead, EvaluationAhead, PlacedAhead, TrainingAhead
from auto3d.trainer.arguments import TrainingArguments
from auto3d.trainer.draws import EvaluationDraws, TrainingDraws, draw_seed_of_workers, read_draws, write_draws
from auto3d.trainer.generators import LOCK, PROCESS, Generators, States
from auto3d.trainer.pipeline import Pipeline
from auto3d.trainer.rank_zero import of_rank_0, tell
from auto3d.trainer.samples import CollatedData, TrainOrder
from auto3d.trainer.stream import Stream, is_stream
from auto3d.trainer.workers import check_persistent


class InSequence:
    """The order, the draws and the workers of the last training in ``pipeline``, and of evaluations in it or after."""

    order: TrainOrder | Stream  # order of the training's samples

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._draws: TrainingDraws | None = None  # draws of the training, unless its samples are a stream
        self._ahead: Ahead | None = None  # batches of the training that worker processes read
        self._generators: dict[bool, Generators] = {}  # True: of a training that draws; False: of an evaluation

    def begin(self, loader: Any, args: TrainingArguments, updates: int) -> None:
        """Find the order of the samples of ``loader``, which are to be trained in so many ``updates`` an epoch."""
        global_batch = self._pipeline.batch.global_batch
        self._draws = None
        if is_stream(loader.dataset):
            self.order = Stream(loader.dataset, global_batch=global_batch, seed=args.seed, tell=tell)
            return
        states = of_rank_0(PROCESS.states, "to say from where it draws the order")
        order = TrainOrder(loader, global_batch=global_batch, iterations_per_epoch=updates, state=states.torch)
        # accelerate's loader, which transformers makes, reads a batch ahead
        self.order, self._draws = order, TrainingDraws(order, states, reads_ahead=isinstance(loader, DataLoaderShard))

    def training(
        self, data: CollatedData, *, generator: torch.Generator | None, folder: Path | None, step: int
    ) -> CollatedData:
        """``data``, whose draws are made one after the other as in one process, if they draw and can be read so.

        They go on after ``step`` steps, from the checkpoint in ``folder``. A loader of the script's may have a
        ``generator``.
        """
        workers, draws = data.workers, _any_rank(data.found.draws)
        self._ahead = None
        if workers is not None and isinstance(self.order, TrainOrder):
            check_persistent(workers, draws=draws or not self.order.is_alone)
            self._ahead = TrainingAhead(self._draws, workers) if draws and self._draws else PlacedAhead(workers)
            data = replace(data, ahead=self._ahead)
        if not draws:
            return data
        self._generators[True] = data.generators
        if generator is not None:
            raise InputError(
                "Trainer.get_train_dataloader: refused: its DataLoader has a generator, and the dataset or the "
                "collator draws random numbers, too; give the generator to its sampler alone"
            )
        if self._draws is None:
            tell(
                "train_dataset or data_collator draws random numbers: with samples of a stream they follow from the "
                "seed and the place of a batch, the same under every plan, and are not those of one transformers "
                "process"
            )
            return data
        self._draws.follow(data if workers is None else None, _of_rank_0(data.generators.states))
        data = replace(data, draws=self._draws)
        if folder is not None:
            point = of_rank_0(lambda: read_draws(folder), "to read where generators were")
            if point is None:
                tell(f"{folder} does not say where generators were: what the data draw begins anew, from the seed")
            self._draws.go_on(step, point)
        return data

    def note(self, data: CollatedData, size: int) -> None:
        """Note the training's ``data``, drawn in batches of ``size``, and the numbers of their dataset and collator."""
        self._data, self._numbers = data, data.numbers()
        if self._draws is not None:
            self._draws.size = size

    def follow(self, step: int, *, begins_epoch: bool) -> None:
        """Read anew what a callback has made others; raises InputError unless the step ``begins_epoch``."""
        numbers = self._data.numbers()
        changed = [name for name, value in numbers.items() if self._numbers.get(name, value) != value]
        if isinstance(self.order, Stream) and (name := self.order.take_change()):
            changed.append(f"train_dataset: {name}")
        if changed and not begins_epoch:
            raise InputError(
                f"Trainer: {changed[0]} was changed in the middle of an epoch, of which samples have been read ahead; "
                "change it in on_epoch_begin, say"
            )
        if changed:
            if isinstance(self.order, Stream):
                self.order.begin(self.order.place(step)[0], step)
            self._read_anew(step)
        self._numbers = numbers

    def begin_epoch(self, epoch: int, first: int, step: int) -> None:
        """Let the iteration after ``step`` be number ``first`` of ``epoch``: a callback has ended another one."""
        if self._draws is not None:
            self._draws.end_epoch(step)
        self.order.begin(epoch, step - first)

    def evaluation(self, data: CollatedData, args: TrainingArguments, step: int | None) -> CollatedData:
        """``data`` of an evaluation that begins now, with their draws, if they draw and can be read so.

        It is after ``step`` steps of the training that runs; None: none runs.
        """
        draws, size = self._draws, args.per_device_eval_batch_size
        workers, is_drawn = data.workers, _any_rank(data.found.draws)
        if workers is not None:
            check_persistent(workers, draws=is_drawn)
        if is_drawn:
            self._generators[False] = data.generators
        elif workers is not None:
            data = replace(data, ahead=PlacedAhead(workers))

        def drawn_by(draws: EvaluationDraws) -> CollatedData:
            ahead = None if workers is None else EvaluationAhead(draws.begin, size, workers)
            return replace(data, draws=draws, ahead=ahead)

        own = data if workers is None and is_drawn else None  # None: this process draws nothing
        if step is not None and draws is not None:
            if is_drawn or draws.is_on:
                self._read_anew(step)
            elif args.device.type == "cpu" and isinstance(self.order, TrainOrder):
                self.order.note_evaluation()  # on a GPU, threads of ranks may have drawn the next epoch
            draws.is_on = draws.is_on or is_drawn
            made = draws.evaluate(own, step, size)
            return drawn_by(made) if is_drawn else data
        if step is not None:
            return data
        if not is_drawn:
            with LOCK:
                draw_seed_of_workers()
            return data
        states = _of_rank_0(data.generators.states)
        return drawn_by(EvaluationDraws(own, size, lambda: states))

    def _read_anew(self, step: int) -> None:
        """Forget what was read ahead of the next step, after ``step`` steps."""
        assert self._pipeline.training is not None
        self._pipeline.training.rank.executor.read_anew()
        if self._draws is not None:
            self._draws.read_anew(step)
        if self._ahead is not None:
            self._ahead.read_anew(step)

    def write(self, folder: Path, step: int) -> None:
        """Write into ``folder`` where the draws are; what the stages draw follows from the seed and the iteration."""
        if (draws := self._draws) is not None and draws.is_on:
            of_rank_0(lambda: write_draws(folder, draws.point(step)), "to write where generators are")

    def finish(self, step: int) -> None:
        """Let the script draw on as it does in one process that has trained ``step`` steps."""
        if (draws := self._draws) is not None and draws.is_on:
            self.go_on_from(lambda: draws.point(step).states)

    def go_on_from(self, states: Callable[[], States]) -> None:
        """Let the generators of all ranks be in the ``states`` of rank 0, which has read the data."""
        reached = _of_rank_0(states)
        with LOCK:
            for generators in self._generators.values():
                generators.set(reached)

    def end(self) -> None:
        """End the workers of the training."""
        if self._ahead is not None:
            self._ahead.end()


def _of_rank_0(states: Callable[[], States]) -> States:
    def text() -> str:
        with LOCK:
            return states().to_json()

    return States.from_json(of_rank_0(text, "to say where generators are"))


def _any_rank(value: bool) -> bool:
    return bool(of_all_ranks([int(value)], torch.int64).any())
