"""Padding of samples to one length, because a captured model has fixed shapes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

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

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        present = batch[self.main].shape[1]
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
            if missing == 0 or value.dim() < 2 or value.shape[1] != present:
                continue
            if name not in self.values:
                raise InputError(
                    f"data_collator: {name}: no padding value is known for it; TrainingArguments.sequence_length pads "
                    f"{', '.join(self.values)}; have the collator pad to a fixed length"
                )
            filler = value.new_full((value.shape[0], missing, *value.shape[2:]), self.values[name])
            padded[name] = torch.cat([filler, value] if self.left else [value, filler], dim=1)
        if missing and "attention_mask" in self.values and "attention_mask" not in batch:
            raise InputError(
                "data_collator: it gives no attention_mask, so padding would be attended to; have it give one, or "
                "make all samples equally long"
            )
        return padded

    def _missing(self, present: int) -> int:
        if present > self.length:
            raise InputError(
                f"train_dataset: a sample has {present} tokens, and TrainingArguments.sequence_length is "
                f"{self.length}; truncate the samples, or give a larger length"
            )
        return self.length - present


def padding_of(length: int | None, model: nn.Module, tokenizer: Any) -> Padding | None:
    """The padding to ``length`` tokens, with the values and on the side of ``tokenizer``; None without a length."""
    if length is None:
        return None
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
    )


_PLACES = ("n_positions", "max_position_embeddings")
_RELATIVE = ("rope_parameters", "rope_theta", "relative_attention_num_buckets", "alibi")


def _has_any(config: Any, names: Collection[str]) -> bool:
    return any(getattr(config, name, None) for name in names)
