"""The inputs of a rank's micro-batches, made from the samples of a source."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from math import prod

import numpy as np
import torch

from auto3d.data.field import SEQUENCE_KINDS, InputField
from auto3d.data.fingerprint import fingerprint
from auto3d.data.interface import IGNORED, Reading, Source
from auto3d.data.keys import DataKeys
from auto3d.data.opening import open_source
from auto3d.data.order import Order
from auto3d.data.sources.own import OwnDataset


class Batches:
    """Makes micro-batches. Sample ``i`` of the whole training follows from (seed, i) alone.

    For replica number ``replica`` of ``replicas`` of a stage, it makes only that replica's slice of each micro-batch.
    Nothing is opened before an input is asked for, and no column that no input asked for needs. Fingerprints are made
    where samples are to be compared.
    """

    def __init__(
        self,
        settings: DataKeys,
        *,
        seed: int,
        global_batch: int,
        micro_batch_size: int,
        replica: int = 0,
        replicas: int = 1,
        is_compared: bool = True,
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._global_batch = global_batch
        self._micro_batch_size = micro_batch_size
        self._samples = micro_batch_size // replicas  # samples of a replica's slice of each micro-batch
        self._replica = replica
        self._is_compared = is_compared

    def micro_batch(self, iteration: int, index: int, names: Collection[str]) -> dict[str, torch.Tensor]:
        """The inputs called ``names`` of micro-batch ``index`` of the global batch, each [samples, *shape]."""
        return self.read(iteration, index, names).inputs

    def read(self, iteration: int, index: int, names: Collection[str]) -> Reading:
        """As ``micro_batch``, with the fingerprints of the samples."""
        if not names:
            return Reading()
        reads = self._settings.reads(names)
        samples, compared = [], []
        with self._reading(reads) as before:
            for number in self._numbers(iteration, index, self._replica):
                before(self._seed, number)
                stored, counts = self._stored(number) if reads else (number, True)
                inputs, tokens = self._sample(number, names, stored, counts)
                samples.append(inputs)
                if reads and self._is_compared:
                    compared.append(fingerprint(self._compared(stored, tokens)))
        return Reading(
            inputs={name: torch.from_numpy(value) for name, value in _arrays(samples).items()},
            fingerprints=np.array(compared, dtype=np.uint64) if compared else None,
        )

    def fingerprints(self, iteration: int, index: int, replica: int | None = None) -> np.ndarray | None:
        """The fingerprints of a ``read`` of micro-batch ``index`` by ``replica``; None: by this replica."""
        settings = self._settings
        if not settings.reads(settings.inputs):
            return None
        fingerprints = []
        with self._reading(True) as before:
            for number in self._numbers(iteration, index, self._replica if replica is None else replica):
                before(self._seed, number)
                stored, _ = self._stored(number)
                tokens = None if settings.columns else self._source.tokens(stored, self._seed)
                fingerprints.append(fingerprint(self._compared(stored, tokens)))
        return np.array(fingerprints, dtype=np.uint64)

    def _numbers(self, iteration: int, index: int, replica: int) -> range:
        """The numbers in the training of the samples of a replica's slice of a micro-batch."""
        first = iteration * self._global_batch + index * self._micro_batch_size + replica * self._samples
        return range(first, first + self._samples)

    def _reading(self, reads: bool) -> AbstractContextManager[Callable[[int, int], None]]:
        """Inside, samples are read if it ``reads``; what this gives is called before each sample."""
        if reads and isinstance(self._source, OwnDataset):
            return self._source.reading()
        return nullcontext(_nothing)

    def _compared(self, stored: int, tokens: np.ndarray | None) -> dict[str, np.ndarray]:
        """What all ranks that read sample ``stored`` of the source know of it: its place there, and its content.

        Where inputs are also made from columns, a rank need not have ``tokens``.
        """
        place = {"place": np.array(stored)}
        if tokens is None or self._settings.columns:
            return {**place, **self._source.whole(stored)}
        return {**place, "tokens": tokens}

    def _sample(
        self, number: int, names: Collection[str], stored: int, counts: bool
    ) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """The inputs called ``names`` of the training's sample ``number``, and its tokens if inputs are made from them.

        ``stored`` and ``counts`` are what ``_stored`` says of it.
        """
        inputs: dict[str, np.ndarray] = {}
        tokens: np.ndarray | None = None
        for position, (name, field) in enumerate(self._settings.inputs.items(), start=1):
            if name not in names:
                continue
            if field.kind in SEQUENCE_KINDS:
                tokens = self._source.tokens(stored, self._seed) if tokens is None else tokens
                inputs[name] = _of_tokens(field, tokens, self._settings.sequence_length, self._source.pad, counts)
            elif field.kind == "column":
                column = self._source.column(stored, field.column or name)
                inputs[name] = column if counts or not field.targets else np.full_like(column, IGNORED)
            else:
                inputs[name] = _draw(field, np.random.default_rng([self._seed, number, position]))
            if field.prefix_length:
                inputs[name] = inputs[name].copy()
                inputs[name][: field.prefix_length] = field.prefix
        return {name: np.asarray(value) for name, value in inputs.items()}, tokens

    def _stored(self, number: int) -> tuple[int, bool]:
        """The source's number of sample ``number``, and whether its targets count: not if it fills a batch.

        A sample that fills a batch is the source's first, so that the model computes what it is made for.
        """
        if self._order is None:
            return number, True
        stored = self._order.sample(number)
        return (0, False) if stored is None else (stored, True)

    @cached_property
    def _source(self) -> Source:
        return open_source(self._settings, self._seed)

    @cached_property
    def _order(self) -> Order | None:
        return order_of(self._settings, self._source, seed=self._seed, global_batch=self._global_batch)


def _nothing(seed: int, number: int) -> None: ...


def _arrays(samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """[samples, …] of each name."""
    return {name: np.array([sample[name] for sample in samples]) for name in samples[0]}


def order_of(settings: DataKeys, source: Source, *, seed: int, global_batch: int) -> Order | None:
    """The order of the samples of ``source``; None if it has no end. Raises DataError if it is too short."""
    if source.samples is None:
        return None
    return Order(
        samples=source.samples,
        global_batch=global_batch,
        seed=seed,
        shuffle=settings.shuffle,
        last_batch=settings.last_batch,
    )


def _of_tokens(field: InputField, tokens: np.ndarray, length: int, pad: int, counts: bool) -> np.ndarray:
    """The ``length`` entries of a field that is made from the ``tokens`` of a sample; its targets may not count."""
    if field.kind == "next-tokens":
        tokens = tokens[1:]
    tokens = tokens[:length]
    if field.kind == "attention-mask":
        return (np.arange(length) < len(tokens)).astype(np.int64)
    targets = field.kind != "tokens"
    if targets and not counts:
        return np.full(length, IGNORED, dtype=np.int64)
    if len(tokens) == length:
        return tokens
    filled = np.full(length, IGNORED if targets else pad, dtype=np.int64)
    filled[: len(tokens)] = tokens
    return filled


def _draw(field: InputField, random: np.random.Generator) -> np.ndarray:
    """One sample of a field that does not come from the source."""
    if field.kind == "integers":
        return random.integers(field.low, field.high, field.shape, dtype=np.int64)
    if field.kind == "normal":
        return random.standard_normal(field.shape, dtype=np.float32)
    if field.kind == "constant":
        return np.full(field.shape, field.value, dtype=str(field.dtype).removeprefix("torch."))
    positions = np.arange(prod(field.shape))
    return (random.permutation(positions) < field.count).reshape(field.shape)
