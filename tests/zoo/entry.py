"""One model of the zoo: how it is built, and the inputs that its forward takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from auto3d.data import DataSettings, InputField

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
    draws: bool = False  # the forward draws random numbers, and the reference must seed each draw as the engine does
    relative: float = 1e-5  # bound of a difference, as a fraction of the largest value of the tensor
    of_whole_batch: bool = False  # its micro-batches have targets of unequal weight, so their means have no plain mean
    only_refused: str = ""  # why no captured graph can be right, so that the only good outcome is a refusal

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


FEATURES = {"x": normal(16), "label": integers(high=4)}
SEQUENCES = {"x": normal(8, 16), "label": integers(high=4)}
TEXT = {"tokens": TOKENS, "label": integers(high=4)}
IMAGES = {"x": normal(3, 16, 16), "label": integers(high=4)}


class Collection:
    """The entries of one family. Used as a decorator of classes that take no arguments."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.entries: list[Entry] = []

    def __call__(
        self,
        inputs: Mapping[str, InputField] = FEATURES,
        *,
        draws: bool = False,
        relative: float = 1e-5,
        of_whole_batch: bool = False,
        only_refused: str = "",
    ) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
        def add(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
            self.entries.append(
                Entry(
                    name=build.__name__,
                    family=self.family,
                    build=build,
                    inputs=inputs,
                    draws=draws,
                    relative=relative,
                    of_whole_batch=of_whole_batch,
                    only_refused=only_refused,
                )
            )
            return build

        return add
