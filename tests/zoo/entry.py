"""One model of the zoo: how it is built, and the inputs that its forward takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from auto3d.runtime.data import DataSettings, InputField

SEQUENCE = 16
VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class Entry:
    """``build`` makes the module; its forward takes ``inputs`` as keyword arguments and returns a loss."""

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Mapping[str, InputField]
    sequence: int = SEQUENCE  # length of inputs of kind tokens
    draws: bool = False  # the forward draws random numbers: the reference seeds each draw as the engine does
    only_refused: str = ""  # why no captured graph can be right: the one good outcome is a refusal

    @property
    def data(self) -> DataSettings:
        return DataSettings(
            source="synthetic",
            files=(),
            sequence_length=self.sequence,
            vocabulary_size=VOCABULARY,
            inputs=self.inputs,
        )


TOKENS = InputField(kind="tokens")


def normal(*shape: int) -> InputField:
    return InputField(kind="normal", shape=shape)


def integers(*shape: int, high: int = 2) -> InputField:
    return InputField(kind="integers", shape=shape, high=high)
