"""Make entries from classes of transformers: tiny configurations, inputs, and wrappers that return a loss."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from auto3d.data import InputField
from tests.zoo.entry import SEQUENCE, TOKENS, VOCABULARY, Entry, integers, normal

TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(name: str, config: Mapping[str, Any]) -> nn.Module:
    """The class called ``name`` with random weights, without dropout and without a cache."""
    import transformers

    model_class = getattr(transformers, name)
    made = model_class.config_class(**deepcopy(dict(config)))
    _without_dropout(made)
    return model_class(made)


def _without_dropout(config: Any) -> None:
    for key, value in vars(config).items():
        if ("drop" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
        elif "drop" in key and isinstance(value, (list, tuple)) and all(isinstance(rate, float) for rate in value):
            setattr(config, key, [0.0] * len(value))
        elif key == "use_cache":
            config.use_cache = False
        elif hasattr(value, "to_dict"):
            _without_dropout(value)


class Contrastive(nn.Module):
    """A model of two towers that is asked to return its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**inputs, return_loss=True).loss


class Illustrated(nn.Module):
    """A language model that reads images: ``count`` tokens called ``image_token`` come before the text."""

    def __init__(self, model: nn.Module, image_token: int, count: int) -> None:
        super().__init__()
        self.model, self.image_token, self.count = model, image_token, count

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        image = input_ids.new_full((input_ids.shape[0], self.count), self.image_token)
        return self.model(
            input_ids=torch.cat([image, input_ids.clamp(min=10)], dim=1),
            labels=torch.cat([image.new_full(image.shape, -100), labels], dim=1),
            **inputs,
        ).loss


class Double(nn.Module):
    """A model in float64: batch statistics of a few numbers would magnify the rounding of float32 beyond any bound."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=pixel_values.double(), labels=labels).loss


class Detector(nn.Module):
    """An object detector with the same number of boxes in each image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor, class_labels: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        boxes = boxes.sigmoid() / 2 + 0.1
        labels = [{"class_labels": of, "boxes": box} for of, box in zip(class_labels, boxes, strict=True)]
        return self.model(pixel_values=pixel_values, labels=labels).loss


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "output_router_logits": True,
}
LATENT = {  # multi-head latent attention, with a value head that is narrower than the query head
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
    "max_position_embeddings": 64,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 8,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
IMAGE = normal(3, 32, 32)
VISION = {**SIZES, "image_size": 32, "patch_size": 8, "num_channels": 3, "num_labels": 4}
LANGUAGE = {"input_ids": TOKENS, "labels": TOKENS}
CLASSES = {"input_ids": TOKENS, "labels": integers(high=2)}
SPAN = {"input_ids": TOKENS, "start_positions": integers(high=SEQUENCE), "end_positions": integers(high=SEQUENCE)}
PICTURE = {"pixel_values": IMAGE, "labels": integers(high=4)}
MAP = {"pixel_values": IMAGE, "labels": integers(32, 32, high=4)}
DEPTH = {"pixel_values": IMAGE, "labels": normal(32, 32)}


def add(
    family: str, name: str, inputs: Mapping[str, InputField], config: Mapping[str, Any], **facts: Any
) -> list[Entry]:
    """The entry of the class called ``name``; ``facts`` are other fields of an Entry."""
    return wrapped(family, name, lambda model: model, inputs, config, **facts)


def wrapped(
    family: str,
    name: str,
    wrap: Callable[[nn.Module], nn.Module],
    inputs: Mapping[str, InputField],
    config: Mapping[str, Any],
    **facts: Any,
) -> list[Entry]:
    """As ``add``, for a model inside the module that ``wrap`` makes."""
    return [Entry(name=name, family=family, build=lambda: wrap(build(name, config)), inputs=inputs, **facts)]


def language(family: str, names: str, base: Mapping[str, Any] = TINY, **changes: Any) -> list[Entry]:
    """Add the models ``names``, from tokens to tokens, all with one configuration."""
    return [entry for name in names.split() for entry in add(family, name, LANGUAGE, {**base, **changes})]
