"""Training data: which samples belong to which micro-batch, whatever the parallel degrees.

Sample number i of iteration t is the same for every Plan; a stage loads only the inputs that it uses.
"""

import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np
import torch

from auto3d.capture.export import InputSpec
from auto3d.errors import InputError

SOURCES = ("text", "synthetic")
TOKEN_KINDS = ("tokens", "next-tokens")
KINDS = (*TOKEN_KINDS, "integers", "normal", "constant", "mask")
BYTE_VALUES = 256


class DataError(InputError):
    """Data that is not there, or too short."""


@dataclass(frozen=True, kw_only=True)
class InputField:
    """How one input of the model is made.

    ``tokens``: a window of the corpus; ``next-tokens``: the same window one token later; ``integers``: uniform in
    [low, high); ``normal``: standard normal; ``constant``: ``value`` everywhere, whose type is the input's;
    ``mask``: booleans, ``count`` of them true, at random places. All but the first two have ``shape``, per sample.
    The first ``prefix_length`` entries of tokens and integers are ``prefix`` instead.
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
            raise DataError(f"kind: {self.kind!r} is not known; there are {', '.join(KINDS)}")

    @property
    def dtype(self) -> torch.dtype:
        if self.kind == "constant":
            return {bool: torch.bool, int: torch.int64, float: torch.float32}[type(self.value)]
        return {"normal": torch.float32, "mask": torch.bool}.get(self.kind, torch.int64)

    @property
    def largest(self) -> int | None:
        """The largest integer that the input may hold, beside tokens of the corpus; None where it holds none."""
        found = [self.prefix] if self.prefix_length else []
        if self.kind == "integers":
            found.append(self.high - 1)
        if self.kind == "constant" and type(self.value) is int:
            found.append(self.value)
        return max(found, default=None)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    source: str  # one of SOURCES: what tokens are made of
    files: tuple[str, ...]  # of the text; none means the source of Python's standard library
    sequence_length: int  # tokens per sample
    vocabulary_size: int  # synthetic tokens are uniform in [0, vocabulary_size)
    inputs: Mapping[str, InputField]  # keyword arguments of the model's forward

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise DataError(f"source: {self.source!r} is not known; there are {', '.join(SOURCES)}")

    def input_specs(self) -> dict[str, InputSpec]:
        return {name: InputSpec(shape=self.shape(field), dtype=field.dtype) for name, field in self.inputs.items()}

    def shape(self, field: InputField) -> tuple[int, ...]:
        """Of one sample of ``field``, one of the inputs."""
        return (self.sequence_length,) if field.kind in TOKEN_KINDS else field.shape

    @property
    def num_tokens(self) -> int:
        """Different tokens that the corpus may have."""
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
        self._first = replica * self._samples  # in each micro-batch

    def micro_batch(self, iteration: int, index: int, names: Collection[str]) -> dict[str, torch.Tensor]:
        """The inputs called ``names`` of micro-batch ``index`` of the global batch; each [samples, *shape]."""
        if not names:
            return {}
        first = iteration * self._global_batch + index * self._micro_batch_size + self._first
        samples = [self._sample(sample, names) for sample in range(first, first + self._samples)]
        return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in names}

    def _sample(self, sample: int, names: Collection[str]) -> dict[str, np.ndarray]:
        made = {}
        window: np.ndarray | None = None
        for position, (name, field) in enumerate(self._settings.inputs.items(), start=1):
            if name not in names:
                continue
            if field.kind in TOKEN_KINDS:
                window = self._window(sample) if window is None else window
                made[name] = window[:-1] if field.kind == "tokens" else window[1:]
            else:
                made[name] = _drawn(field, np.random.default_rng([self._seed, sample, position]))
            if field.prefix_length:
                made[name] = made[name].copy()
                made[name][: field.prefix_length] = field.prefix
        return {name: np.asarray(value) for name, value in made.items()}

    def _window(self, sample: int) -> np.ndarray:
        """sequence_length + 1 consecutive tokens."""
        random = np.random.default_rng([self._seed, sample, 0])
        length = self._settings.sequence_length + 1
        if self._settings.source == "synthetic":
            return random.integers(0, self._settings.vocabulary_size, length, dtype=np.int64)
        start = random.integers(0, len(self._corpus) - length + 1)
        return self._corpus[start : start + length].astype(np.int64)

    @cached_property
    def _corpus(self) -> np.ndarray:
        return read_corpus(self._settings.files, self._settings.sequence_length + 1)


def _drawn(field: InputField, random: np.random.Generator) -> np.ndarray:
    """One sample of a field that does not come from the corpus."""
    if field.kind == "integers":
        return random.integers(field.low, field.high, field.shape, dtype=np.int64)
    if field.kind == "normal":
        return random.standard_normal(field.shape, dtype=np.float32)
    if field.kind == "constant":
        return np.full(field.shape, field.value, dtype=str(field.dtype).removeprefix("torch."))
    places = np.arange(prod(field.shape))
    return (random.permutation(places) < field.count).reshape(field.shape)


def read_corpus(files: Sequence[str], least: int) -> np.ndarray:
    """The bytes of ``files``, one after the other; raises DataError if they are fewer than ``least``."""
    paths = [Path(file) for file in files] if files else standard_library()
    try:
        text = b"".join(path.read_bytes() for path in paths)
    except OSError as error:
        raise DataError(f"files: {error.filename}: {error.strerror}") from error
    if len(text) < least:
        raise DataError(f"files: {len(text)} bytes in {len(paths)} files; one sample needs {least}")
    return np.frombuffer(text, dtype=np.uint8)


def standard_library() -> list[Path]:
    """The source files of the standard library of this Python, without its tests, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(sys.stdlib_module_names - {"test", "idlelib", "lib2to3"})
    found = [
        path for name in names for path in (root / f"{name}.py", *sorted((root / name).rglob("*.py"))) if path.is_file()
    ]
    return [path for path in found if not {"test", "tests", "site-packages"} & set(path.relative_to(root).parts)]
