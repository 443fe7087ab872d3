"""What a training reads: the source of its samples, and how each input of the model is made from them."""

from collections.abc import Mapping
from dataclasses import dataclass

from auto3d.capture.export import InputSpec
from auto3d.data.batches import Batches
from auto3d.data.field import TOKEN_KINDS, InputField
from auto3d.data.interface import BatchSlice, DataError
from auto3d.data.sources.text import BYTE_VALUES

SOURCES = ("text", "synthetic")


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

    def micro_batches(self, part: BatchSlice) -> Batches:
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
