"""DataLoaders of a Trainer or its script, of which a pipeline takes the dataset, the order and the collator."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from transformers.trainer_pt_utils import LengthGroupedSampler
from xxhash import xxh3_64

from auto3d.errors import InputError
from auto3d.runtime.messages.gathered import of_all_ranks
from auto3d.trainer.checks import check_padding, check_same_data, check_samples, limits_of, needs_mask
from auto3d.trainer.generators import PROCESS, Generators
from auto3d.trainer.lengths import length_of_stream, lengths_of, lengths_to_capture
from auto3d.trainer.looks import reached
from auto3d.trainer.padding import Padding, padding_of
from auto3d.trainer.pipeline import Pipeline
from auto3d.trainer.rank_zero import of_rank_0, tell
from auto3d.trainer.samples import CollatedData, InOrder, TrainOrder, check_constants, samples_of
from auto3d.trainer.stream import Stream, is_stream
from auto3d.trainer.workers import Workers


def check_loader(loader: Any, method: str, size: int, argument: str) -> None:
    """Raise InputError unless a pipeline can read what ``loader``, which the Trainer's ``method`` returned, would.

    ``size`` is the number of samples of its batches that ``argument`` says.
    """
    if reason := _why_not(loader, size, argument):
        raise InputError(
            f"Trainer.{method}: refused: it returned {reason}; return a torch DataLoader, whose dataset, sampler, "
            f"collate_fn, drop_last and workers are taken, with batch_size={size}"
        )


def _why_not(loader: Any, size: int, argument: str) -> str:
    if not isinstance(loader, DataLoader) or type(loader).__iter__ not in (
        DataLoader.__iter__,
        DataLoaderShard.__iter__,
    ):
        return f"a {type(loader).__name__}, whose batches each rank would have to read in full, to take its own"
    if is_stream(loader.dataset):
        return "a DataLoader of a stream: give the Trainer the stream as its dataset"
    if type(loader.batch_sampler) is not BatchSampler:
        kind = type(loader.batch_sampler).__name__ if loader.batch_sampler is not None else "no batches"
        return f"a DataLoader with {kind}, whose batches may differ in size: give the order of samples as its sampler"
    if isinstance(loader.batch_sampler.sampler, DistributedSampler):
        return "a DataLoader with a DistributedSampler, and the plan divides the samples: give the order of all of them"
    if not hasattr(loader.batch_sampler.sampler, "__len__"):
        return "a DataLoader whose sampler has no length: give it __len__"
    if not len(loader):
        return "a DataLoader without batches: give it samples"
    if loader.batch_sampler.batch_size != size:  # a prepared loader has None as its own
        return f"a DataLoader with batch_size={loader.batch_sampler.batch_size}, and {argument} says {size}"
    return ""


def positions_of(sampler: Any) -> Sequence[int] | None:
    """The order in which an evaluation takes samples by ``sampler``; None: in the dataset's order.

    Raises InputError for a sampler of the script's that draws an order, which would be another one in each evaluation.
    """
    if isinstance(sampler, SequentialSampler):
        return None
    if isinstance(sampler, LengthGroupedSampler):  # transformers' own
        return list(sampler)
    before = PROCESS.states()
    with PROCESS.at(before):
        positions = list(sampler)
        is_drawn = PROCESS.states().to_json() != before.to_json() or positions != list(sampler)
    if is_drawn:
        raise InputError(
            f"Trainer.get_eval_dataloader: refused: its sampler, a {type(sampler).__name__}, draws an order; give "
            "evaluations a fixed one, such as shuffle=False of a torch.utils.data.Subset"
        )
    return positions


class LoadedSamples:
    """What ``pipeline`` reads of the DataLoaders of ``trainer``: their samples, as that collates and pads them."""

    def __init__(self, trainer: transformers.Trainer, pipeline: Pipeline) -> None:
        self._trainer: Any = trainer  # a script may set its collator, say, at any time
        self._pipeline = pipeline
        self._length: int | None = None  # tokens to which samples are padded where the arguments do not say it
        self._needs_mask = True  # see Padding

    def of_training(
        self, loader: Any, others: Callable[[], Mapping[str, Any]], order: TrainOrder | Stream, max_steps: int
    ) -> CollatedData:
        """The samples of ``loader``, checked, as many as ``max_steps`` take in ``order``; all ranks must call it.

        Where they are padded to the longest, these are also of ``others``, the loaders of evaluations.
        """
        missing = 0
        if not isinstance(order, Stream):
            samples, global_batch = samples_of(loader.batch_sampler), self._pipeline.batch.global_batch
            if samples < global_batch:
                raise InputError(
                    f"train_dataset: it has {samples} samples, fewer than a global batch of {global_batch} "
                    "(per_device_train_batch_size × gradient_accumulation_steps × pipelines); give more samples, or "
                    "smaller batches"
                )
            missing = -samples % global_batch if max_steps >= order.iterations_per_epoch else 0
        self._length = None
        lengths = self._find_length([loader, *others().values()], order)
        self._find_padding(loader, order)
        data = replace(self._collated(loader, order), missing=missing).with_shapes()
        self._pipeline.call_with(data.constants)
        check_same_data(data, "train_dataset")
        if lengths is not None and self._length is not None and isinstance(order, TrainOrder):
            longest = self._of_micro_batches(order, lengths, max_steps)
            if longest is not None:
                captured = lengths_to_capture(longest, self._length)[:-1]
                data = replace(data, sample_lengths=lengths, captured_lengths=captured)
        check_samples(data, self.main_input)
        check = partial(check_padding, self._trainer.model, self._trainer.compute_loss, data, self.main_input)
        of_rank_0(check, "to compare a loss with and without padding")
        return data

    def of_evaluation(self, loader: Any) -> CollatedData:
        """The samples of ``loader``; all ranks must call it."""
        samples = samples_of(loader.batch_sampler)
        if not samples:
            raise InputError(
                "Trainer: the dataset of an evaluation has no samples, or with dataloader_drop_last no whole batch; "
                "give it some, or leave it out"
            )
        sampler, global_batch = loader.batch_sampler.sampler, self._pipeline.batch.global_batch
        order = InOrder(samples, global_batch, positions=positions_of(sampler))
        if not self._trainer.is_in_train:
            self._find_length([loader], order)
            self._find_padding(loader, order)
        data = self._collated(loader, order).with_shapes()
        if self._trainer.is_in_train:
            check_constants(data.constants, self._pipeline.constants, "in the training it is")
        self._pipeline.call_with(data.constants)
        return data

    def _collated(self, loader: Any, order: TrainOrder | InOrder | Stream) -> CollatedData:
        for name, value in {"dataset": loader.dataset, "data_collator": self._trainer.data_collator}.items():
            if not reached(value).isdisjoint(self._trainer.model.modules()):
                raise InputError(
                    f"Trainer: {name} uses the model, whose weights are in the pipeline while samples are read; "
                    "compute in the model's forward what needs them, or give it a copy of the model"
                )
        collator = getattr(loader.collate_fn, "data_collator", loader.collate_fn)  # transformers may have wrapped it
        if is_stream(loader.dataset):  # it is read under a lock of its own
            generators = Generators(nullcontext(), data_collator=collator)
        else:
            use = "train" if isinstance(order, TrainOrder) else "eval"
            generators = Generators(data_collator=collator, **{f"{use}_dataset": loader.dataset})
        return CollatedData(
            dataset=order if isinstance(order, Stream) else loader.dataset,
            collate=loader.collate_fn,
            order=order,
            padding=self._padding(self._trainer.args.sequence_length or self._length),
            seed=self._trainer.args.seed,
            label_names=tuple(self._trainer.label_names),
            returns_loss=self._trainer.can_return_loss,
            limits=limits_of(self._trainer.model, self.main_input, self._trainer.label_names),
            generators=generators,
            workers=Workers.of(loader),
        )

    def _padding(self, length: int | None) -> Padding | None:
        if length is None:
            return None
        is_found = self._trainer.args.sequence_length is None
        padding = padding_of(length, self._trainer.model, self._tokenizer, is_found=is_found)
        return replace(padding, needs_mask=self._needs_mask)

    def _find_padding(self, loader: Any, order: TrainOrder | InOrder | Stream) -> None:
        """Find whether samples of ``loader`` that have no attention_mask can be padded; all ranks must call it."""
        if (length := self._trainer.args.sequence_length or self._length) is None:
            return
        padding, data = padding_of(length, self._trainer.model, self._tokenizer), self._collated(loader, order)
        find = partial(needs_mask, self._trainer.model, self._trainer.compute_loss, data, padding)
        self._needs_mask = of_rank_0(find, "to find whether padding counts")

    def _find_length(self, loaders: Sequence[Any], order: TrainOrder | InOrder | Stream) -> np.ndarray | None:
        """Let samples be padded to the longest of all ``loaders``, if they differ in length; all ranks must call it.

        Returns the lengths of the samples of the first, if they are known.
        """
        if self._trainer.args.sequence_length is not None:
            return None
        padding = padding_of(0, self._trainer.model, self._tokenizer)
        of_stream: list[np.ndarray | None] = []
        if is_stream(loaders[0].dataset):
            length = length_of_stream(self._collated(loaders[0], order), padding)
            of_stream, loaders = [None if length is None else np.array([length])], loaders[1:]

        def lengths() -> tuple[int | None, np.ndarray | None]:
            plain = (replace(self._collated(loader, InOrder(0, 1)), padding=None) for loader in loaders)
            of_all = [*of_stream, *(lengths_of(data, padding) for data in plain)]
            known = [part for part in of_all if part is not None]
            if len(known) < len(of_all) or len({int(end) for part in known for end in (part.min(), part.max())}) == 1:
                return None, None
            return max(int(part.max()) for part in known), None if of_stream else known[0]

        longest, first = of_rank_0(lengths, "to find how long samples are")
        if longest is not None and longest > (self._length or 0):
            self._length = longest
        return first

    def _of_micro_batches(self, order: TrainOrder, lengths: np.ndarray, max_steps: int) -> np.ndarray | None:
        """The tokens of the longest sample in each micro-batch of the first epoch, or of as much as tells them all.

        None unless all ranks have the same order of samples, so that they know the lengths of each other's messages.
        """
        size, looked_at = self._pipeline.batch.micro_batch_size, min(max_steps, 1000)
        digest, longest = xxh3_64(), list[int]()
        for step in range(order.iterations_per_epoch if order.is_known else 0):
            samples = np.asarray(order.of(step), dtype=np.int64)
            digest.update(samples.tobytes())
            if step < looked_at:
                longest += [lengths[samples[first : first + size]].max() for first in range(0, len(samples), size)]
        mine = digest.intdigest() >> 2 if longest else 0
        digests = of_all_ranks([mine], torch.int64)
        return np.array(longest) if mine and bool((digests == mine).all()) else None

    @property
    def main_input(self) -> str:
        """The name of the model's main input."""
        return getattr(self._trainer.model, "main_input_name", "input_ids")

    def tell_length(self) -> None:
        """Say so if samples are padded to the longest."""
        if self._length is not None:
            to = [*map(str, self._pipeline.captured_lengths), str(self._length)]
            tell(f"samples differ in length: each micro-batch is padded to {' or '.join(to)} tokens")

    @property
    def _tokenizer(self) -> Any:
        given = self._trainer.processing_class
        return given if given is not None else getattr(self._trainer.data_collator, "tokenizer", None)
