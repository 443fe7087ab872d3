"""The inputs of a rank's micro-batches, made from the samples of a source."""

from collections.abc import Collection
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from auto3d.data.field import TOKEN_KINDS, InputField
from auto3d.data.sources.text import read_corpus

if TYPE_CHECKING:
    from auto3d.data.settings import DataSettings


class Batches:
    """Makes micro-batches. Sample ``i`` of the whole training is drawn from (seed, i) alone.

    For replica number ``replica`` of ``replicas`` of a stage, it makes only that replica's slice of each micro-batch.
    """

    def __init__(
        self,
        settings: "DataSettings",
        *,
        seed: int,
        global_batch: int,
        micro_batch_size: int,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._global_batch = global_batch
        self._micro_batch_size = micro_batch_size
        self._samples = micro_batch_size // replicas
        self._first = replica * self._samples  # first sample of the replica's slice of each micro-batch

    def micro_batch(self, iteration: int, index: int, names: Collection[str]) -> dict[str, torch.Tensor]:
        """The inputs called ``names`` of micro-batch ``index`` of the global batch, each [samples, *shape]."""
        if not names:
            return {}
        first = iteration * self._global_batch + index * self._micro_batch_size + self._first
        samples = [self._sample(sample, names) for sample in range(first, first + self._samples)]
        return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in names}

    def _sample(self, sample: int, names: Collection[str]) -> dict[str, np.ndarray]:
        inputs: dict[str, np.ndarray] = {}
        window: np.ndarray | None = None
        for position, (name, field) in enumerate(self._settings.inputs.items(), start=1):
            if name not in names:
                continue
            if field.kind in TOKEN_KINDS:
                window = self._window(sample) if window is None else window
                inputs[name] = window[:-1] if field.kind == "tokens" else window[1:]
            else:
                inputs[name] = _draw(field, np.random.default_rng([self._seed, sample, position]))
            if field.prefix_length:
                inputs[name] = inputs[name].copy()
                inputs[name][: field.prefix_length] = field.prefix
        return {name: np.asarray(value) for name, value in inputs.items()}

    def _window(self, sample: int) -> np.ndarray:
        """The sequence_length + 1 consecutive tokens of ``sample``."""
        random = np.random.default_rng([self._seed, sample, 0])
        length = self._settings.sequence_length + 1
        if self._settings.source == "synthetic":
            return random.integers(0, self._settings.vocabulary_size, length, dtype=np.int64)
        start = random.integers(0, len(self._corpus) - length + 1)
        return self._corpus[start : start + length].astype(np.int64)

    @cached_property
    def _corpus(self) -> np.ndarray:
        return read_corpus(self._settings.files, self._settings.sequence_length + 1)


def _draw(field: InputField, random: np.random.Generator) -> np.ndarray:
    """One sample of a field that does not come from the corpus."""
    if field.kind == "integers":
        return random.integers(field.low, field.high, field.shape, dtype=np.int64)
    if field.kind == "normal":
        return random.standard_normal(field.shape, dtype=np.float32)
    if field.kind == "constant":
        return np.full(field.shape, field.value, dtype=str(field.dtype).removeprefix("torch."))
    positions = np.arange(prod(field.shape))
    return (random.permutation(positions) < field.count).reshape(field.shape)
