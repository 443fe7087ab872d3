"""How wide predictions and labels of an evaluation are in transformers, where batches have other lengths.

Each batch is as wide as its collator pads it, and all together as the widest: behind shorter ones there is IGNORED.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import nn

from auto3d.capture.empty import empty_model
from auto3d.capture.export import InputSpec
from auto3d.trainer.instance import run_without_values
from auto3d.trainer.padding import Padding
from auto3d.trainer.predictions import outputs_of
from auto3d.trainer.samples import CollatedData, InOrder


@dataclass(frozen=True, kw_only=True)
class Widths:
    """How an evaluation's outputs and inputs are cut, batch by batch."""

    batches: Sequence[tuple[int, int]]  # tokens of each batch: of the main input, and of a decoder's
    of_decoder: Mapping[str, bool]
    """Outputs and inputs whose first dimension after the samples' has the length of the main input, or of a
    decoder's."""
    left: bool  # whether padding comes before the tokens

    def cut(self, name: str, value: torch.Tensor, batch: int) -> torch.Tensor:
        """What ``value``, of the samples of this ``batch``, is in transformers."""
        if name not in self.of_decoder:
            return value
        is_of_decoder = self.of_decoder[name]
        width = self.batches[batch][is_of_decoder]
        return value[:, -width:] if self.left and not is_of_decoder else value[:, :width]


def widths_of(data: CollatedData, batch: int) -> list[tuple[int, int]]:
    """The tokens of each ``batch`` samples of ``data`` as its collator pads them: of the main input, of a decoder's."""
    assert data.padding is not None
    assert isinstance(data.order, InOrder)
    plain, padding, widths = replace(data, padding=None), data.padding, []
    for first in range(0, data.order.samples, batch):
        made = plain.collated(data.order.between(first, first + batch), [first // batch, 0])
        decoder = [made[name].shape[1] for name in padding.decoder if name in made and made[name].dim() == 2]
        widths.append((made[padding.main].shape[-1], max(decoder, default=0)))
    return widths


def lengthened(
    build: Callable[[], nn.Module], inputs: Mapping[str, InputSpec], padding: Padding, *, device: str
) -> dict[str, bool]:
    """The outputs, and of ``inputs`` those that ``padding`` pads, that are as long as the main input or a decoder's.

    The model that ``build`` makes is run without values for samples that are one token shorter.
    """
    model = empty_model(build, device)
    model.module.eval()

    def shapes(of: Mapping[str, InputSpec]) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in outputs_of(run_without_values(model, of)).items()}

    of_decoders: dict[str, bool] = {}
    with suppress(Exception):  # what a model cannot do with fewer tokens, it does with as many only
        whole = shapes(inputs)
        for of_decoder in (False, True):
            shorter = padding.shapes_at(padding.length - 1, inputs, decoder=of_decoder)
            of_decoders |= {
                name: of_decoder for name, spec in inputs.items() if spec != shorter[name] and len(spec.shape) == 1
            }
            with suppress(Exception):
                of_decoders |= {
                    name: of_decoder
                    for name, shape in shapes(shorter).items()
                    if shorter != inputs and shape[1:2] != whole[name][1:2]
                }
    return of_decoders
