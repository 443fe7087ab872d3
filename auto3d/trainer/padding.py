"""Padding of samples to one length, because a captured model has fixed shapes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from auto3d.capture.export import InputSpec
from auto3d.data.interface import IGNORED
from auto3d.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Pads each sample to ``length`` tokens.

    Padded are the inputs that are as long as the one called ``main``, by their entry in ``values``, and those in
    ``decoder``, which may have another length.
    """

    length: int
    values: Mapping[str, int]
    decoder: Mapping[str, int] = field(default_factory=dict)
    """Inputs of a decoder. They are padded behind their tokens, where those attend to nothing."""
    main: str = "input_ids"
    left: bool = False  # whether the tokenizer pads on the left
    places: bool = False  # whether the model has an embedding for each place
    says: str = "TrainingArguments.sequence_length is"  # who says the length, in words
    needs_mask: bool = True  # whether padding counts unless an attention_mask hides it

    def length_of(self, batch: Mapping[str, torch.Tensor]) -> int | None:
        """The tokens of the longest sequence in ``batch``; None if it has none as the main input."""
        main = batch.get(self.main)
        if main is None or main.dim() not in (2, 3) or main.dtype.is_floating_point:
            return None
        sequences = (batch[name] for name in (self.main, *self.decoder) if name in batch)
        return max(sequence.shape[-1] for sequence in sequences if sequence.dim() == main.dim())

    def shapes_at(
        self, length: int, shapes: Mapping[str, InputSpec], *, decoder: bool | None = None
    ) -> dict[str, InputSpec]:
        """``shapes`` of a padded sample for one that is padded to another ``length``.

        With ``decoder``, only the inputs of a decoder are, or only the others.
        """
        names, at = {*self.values, *self.decoder}, len(shapes[self.main].shape) - 1
        if decoder is not None:
            names = {*self.decoder} if decoder else names - self.decoder.keys()

        def shape(spec: InputSpec) -> tuple[int, ...]:
            return *spec.shape[:at], length, *spec.shape[at + 1 :]

        return {
            name: replace(spec, shape=shape(spec))
            if name in names and spec.shape[at : at + 1] == (self.length,)
            else spec
            for name, spec in shapes.items()
        }

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.main not in batch:
            raise InputError(
                f"TrainingArguments.sequence_length: data_collator makes no {self.main}, whose length it says; have "
                "it pad all samples to one length, or let the model say its main_input_name"
            )
        at = batch[self.main].dim() - 1  # 1; 2 where a sample is several texts
        present = batch[self.main].shape[at]
        missing = self._missing(present)
        if missing and self.left and self.places:
            raise InputError(
                "processing_class: its padding_side is left, and the model has an embedding for each place, which "
                "padding to sequence_length would shift; set padding_side to right, or make all samples equally long"
            )
        padded = dict(batch)
        for name, value in batch.items():
            if name in self.decoder:
                padded[name] = pad(value, (0, self._missing(value.shape[1])), value=self.decoder[name])
                continue
            if missing == 0 or value.dim() <= at or value.shape[at] != present:
                continue
            if name == "labels" and value.dtype.is_floating_point:  # numbers of a sample, as many as tokens by chance
                continue
            if name not in self.values:
                raise InputError(
                    f"data_collator: {name}: no padding value is known for it; TrainingArguments.sequence_length pads "
                    f"{', '.join(self.values)}; have the collator pad to a fixed length"
                )
            filler = value.new_full((*value.shape[:at], missing, *value.shape[at + 1 :]), self.values[name])
            padded[name] = torch.cat([filler, value] if self.left else [value, filler], dim=at)
        if missing and self.needs_mask and "attention_mask" not in batch:
            raise InputError(
                "data_collator: it gives no attention_mask, and the model's loss was not found to be the same with "
                "padding, which it would attend to; have it give one, or make all samples equally long"
            )
        return padded

    def _missing(self, present: int) -> int:
        if present > self.length:
            raise InputError(
                f"train_dataset: a sample has {present} tokens, and {self.says} {self.length}; truncate the "
                "samples, or give a larger TrainingArguments.sequence_length"
            )
        return self.length - present


def padding_of(length: int, model: nn.Module, tokenizer: Any, *, is_found: bool = False) -> Padding:
    """The padding to ``length`` tokens, which the samples say if it ``is_found``, as ``tokenizer`` pads."""
    config = getattr(model, "config", None)
    token = getattr(tokenizer, "pad_token_id", None)
    token = getattr(config, "pad_token_id", None) if token is None else token
    token = 0 if token is None else token  # any token serves: attention_mask hides it
    decoder = {"labels": IGNORED, "decoder_input_ids": token, "decoder_attention_mask": 0}
    return Padding(
        length=length,
        values={
            "input_ids": token,
            "attention_mask": 0,
            "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
            "special_tokens_mask": 1,
            "labels": IGNORED,
        },
        decoder=decoder if getattr(config, "is_encoder_decoder", False) else {},
        main=getattr(model, "main_input_name", "input_ids"),
        left=getattr(tokenizer, "padding_side", "right") == "left",
        places=_has_any(config, _PLACES) and not _has_any(config, _RELATIVE),
        says="the longest was found to have" if is_found else Padding.says,
    )


_PLACES = ("n_positions", "max_position_embeddings")
_RELATIVE = ("rope_parameters", "rope_theta", "relative_attention_num_buckets", "alibi")


def _has_any(config: Any, names: Collection[str]) -> bool:
    return any(getattr(config, name, None) for name in names)
