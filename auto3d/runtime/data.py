"""Training data: the samples of each micro-batch, which do not depend on the parallel degrees.

Sample number i of iteration t is the same for every Plan. A stage loads only the inputs that it uses.
"""

import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from auto3d.capture.export import InputSpec
from auto3d.errors import InputError

SOURCES = ("text", "synthetic")
TOKEN_KINDS = ("tokens", "next-tokens")
KINDS = (*TOKEN_KINDS, "integers", "normal", "constant", "mask")
BYTE_VALUES = 256


class DataError(InputError):
    """Data that is missing or too short."""


@dataclass(frozen=True, kw_only=True)
class BatchSlice:
    """The samples that one rank takes of every global batch, and the seed of their order."""

    seed: int
    global_batch: int
    micro_batch_size: int  # samples that all replicas of a stage run together
    replica: int = 0  # number of the rank among the replicas of its stages
    replicas: int = 1


class MicroBatches(Protocol):
    """Makes the inputs of one rank's micro-batches. Two ranks that ask for the same input get the same values."""

    def micro_batch(self, iteration: int, index: int, names: Collection[str]) -> dict[str, torch.Tensor]:
        """The inputs called ``names`` of micro-batch ``index`` of the global batch, each [samples, *shape]."""


class TrainingData(Protocol):
    """What a training reads. A DataSettings is one; it is pickled or forked to every rank."""

    @property
    def may_ignore_targets(self) -> bool:
        """Whether a label may be one that losses ignore, such as -100."""

    def micro_batches(self, part: BatchSlice) -> MicroBatches:
        """The micro-batches of the rank that takes ``part``."""


@dataclass(frozen=True, kw_only=True)
class InputField:
    """How one input of the model is made.

    ``tokens``: a window of the corpus. ``next-tokens``: the same window, one token later. ``integers``: uniform in
    [low, high). ``normal``: standard normal. ``constant``: ``value`` everywhere; its type is the type of the input.
    ``mask``: booleans, of which ``count`` are true, at random positions. All but the first two have ``shape``, the
    shape of one sample. The first ``prefix_length`` entries of tokens and integers are replaced by ``prefix``.
    """

    kind: str  # one of KINDS
    shape: tuple[int, ...] = ()
    low: int = 0
    high: int = 2
    value: bool | int | float = 1
    count: int = 1
    prefix: int = 0
    prefix_length: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise DataError(f"kind: {self.kind!r} is not known; use one of {', '.join(KINDS)}")

    @property
    def dtype(self) -> torch.dtype:
        if self.kind == "constant":
            return {bool: torch.bool, int: torch.int64, float: torch.float32}[type(self.value)]
        return {"normal": torch.float32, "mask": torch.bool}.get(self.kind, torch.int64)

    @property
    def largest(self) -> int | None:
        """The largest integer that the input may contain, apart from tokens; None if it contains no integers."""
        integers = [self.prefix] if self.prefix_length else []
        if self.kind == "integers":
            integers.append(self.high - 1)
        if self.kind == "constant" and type(self.value) is int:
            integers.append(self.value)
        return max(integers, default=None)

    @property
    def smallest(self) -> int | None:
        """The smallest integer that the input may contain, apart from tokens; None if it contains no integers."""
        integers = [self.prefix] if self.prefix_length else []
        if self.kind == "integers":
            integers.append(self.low)
        if self.kind == "constant" and type(self.value) is int:
            integers.append(self.value)
        return min(integers, default=None)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    inputs: Mapping[str, InputField]  # keyword arguments of the model's forward
    source: str = "text"  # one of SOURCES, from which tokens are made
    files: tuple[str, ...] = ()  # text files; empty: the source code of Python's standard library
    sequence_length: int = 128  # tokens per sample
    vocabulary_size: int = 256  # synthetic tokens are uniform in [0, vocabulary_size)

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise DataError(f"source: {self.source!r} is not known; use one of {', '.join(SOURCES)}")

    def micro_batches(self, part: BatchSlice) -> "Batches":
        return Batches(self, **vars(part))

    def input_specs(self) -> dict[str, InputSpec]:
        return {name: InputSpec(shape=self.shape(field), dtype=field.dtype) for name, field in self.inputs.items()}

    def shape(self, field: InputField) -> tuple[int, ...]:
        """The shape of one sample of ``field``, one of the inputs."""
        return (self.sequence_length,) if field.kind in TOKEN_KINDS else field.shape

    @property
    def may_ignore_targets(self) -> bool:
        """Whether an integer of an input may be negative, as labels are that losses ignore."""
        return any(field.smallest is not None and field.smallest < 0 for field in self.inputs.values())

    @property
    def num_tokens(self) -> int:
        """Number of different tokens that the corpus may contain."""
        return BYTE_VALUES if self.source == "text" else self.vocabulary_size


class Batches:
    """Makes micro-batches. Sample ``i`` of the whole training is drawn from (seed, i) alone.

    For replica number ``replica`` of ``replicas`` of a stage, it makes only that replica's slice of each micro-batch.
    """

    def __init__(
        self,
        settings: DataSettings,
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


def read_corpus(names: Sequence[str], least: int) -> np.ndarray:
    """The bytes of the files called ``names``, concatenated. Raises DataError if there are fewer than ``least``."""
    paths = [Path(name) for name in names] if names else standard_library()
    try:
        text = b"".join(path.read_bytes() for path in paths)
    except OSError as error:
        raise DataError(f"files: {error.filename}: {error.strerror}") from error
    if len(text) < least:
        files = "1 file" if len(paths) == 1 else f"{len(paths)} files"
        raise DataError(f"files: {len(text)} bytes in {files}; one sample needs {least}")
    return np.frombuffer(text, dtype=np.uint8)


def standard_library() -> list[Path]:
    """The source files of this Python's standard library, without its tests, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(sys.stdlib_module_names - {"test", "idlelib", "lib2to3"})
    files = [
        path for name in names for path in (root / f"{name}.py", *sorted((root / name).rglob("*.py"))) if path.is_file()
    ]
    return [path for path in files if not {"test", "tests", "site-packages"} & set(path.relative_to(root).parts)]
