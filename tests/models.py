"""The small models that tests train: unmodified, built as a user's recipe would."""

import argparse
import os
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from auto3d.capture.cache import Cache
from auto3d.capture.model import CapturedModel, capture
from auto3d.capture.program_json import NotStorableError, captured_from_json, captured_to_json
from auto3d.data import DataSettings, InputField
from recipes.examples import resnet
from tests import kept

SEQUENCE = 32


def gpt2(dropout: float = 0.0, **others: Any) -> GPT2LMHeadModel:
    """Tied embedding and head; four layers, so that four stages are possible."""
    sizes = {"n_layer": 4, "n_embd": 32, "n_head": 2, "n_positions": SEQUENCE, "vocab_size": 256}
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, bos_token_id=0, eos_token_id=0, **(sizes | rates | others)))


SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DROPOUT = dict.fromkeys(NO_DROPOUT, 0.1)


def bert(dropout: dict[str, float] = NO_DROPOUT, **others: Any) -> BertForMaskedLM:
    return BertForMaskedLM(BertConfig(**({"vocab_size": 256} | SIZES | dropout | others)))


def t5(dropout: float = 0.0, **others: Any) -> T5ForConditionalGeneration:
    """Two stacks with skips between them, and labels that are shifted in place."""
    sizes = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16, "dropout_rate": dropout}
    tokens = {"vocab_size": 256, "decoder_start_token_id": 0, "pad_token_id": 0}
    return T5ForConditionalGeneration(T5Config(use_cache=False, **(sizes | tokens | others)))


def llama(**others: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(use_cache=False, **({"vocab_size": 256} | SIZES | others)))


def llama_with_tied_embeddings() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, tie_word_embeddings=True, **SIZES))


def bert_for_pretraining() -> BertForPreTraining:
    return BertForPreTraining(BertConfig(vocab_size=256, **SIZES, **NO_DROPOUT))


def vit(dropout: dict[str, float] = NO_DROPOUT, **others: Any) -> ViTForImageClassification:
    sizes = {"image_size": 32, "patch_size": 8} | SIZES
    return ViTForImageClassification(ViTConfig(**(sizes | dropout | others)))


def swin(**others: Any) -> SwinForImageClassification:
    """Shifted windows, and images that shrink between its groups of layers."""
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2]}
    fixed = {"window_size": 4, "drop_path_rate": 0.0}
    return SwinForImageClassification(SwinConfig(**(sizes | fixed | NO_DROPOUT | others)))


def small_resnet() -> nn.Module:
    return resnet(depth=50, width_factor=0.125, classes=2)


def resnet_of_transformers() -> ResNetForImageClassification:
    """Few groups, so that statistics are of 32 numbers or more: where they are of 2, they magnify rounding."""
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]}
    return ResNetForImageClassification(ResNetConfig(**sizes, layer_type="bottleneck"))


class Residual(nn.Module):
    """Not a language model: shared input and layer, batch statistics, a long skip, a frozen and a float64 parameter."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.shared = nn.Linear(width, width)
        self.normal = nn.BatchNorm1d(width)
        self.activation = nn.ReLU(inplace=True)
        self.head = nn.Linear(width, 4)
        self.head.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        hidden = self.shared(self.activation(self.first(features)))
        skip = hidden
        hidden = self.shared(self.activation(self.normal(hidden)))
        hidden = (hidden + skip + features) * self.scale.float()
        return nn.functional.cross_entropy(self.head(hidden), label)


class Guided(nn.Module):
    """Inputs of the later layers are larger than all activations: a hint for the third, and the targets of the loss."""

    def __init__(self, width: int = 32, hint: int = 4096, targets: int = 8192) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, width) for size in (16, width, width, width))
        self.pool = nn.AvgPool1d(hint // width)
        self.spread = targets // width

    def forward(self, features: torch.Tensor, hint: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = features
        for number, layer in enumerate(self.layers):
            hidden = nn.functional.gelu(layer(hidden))
            if number == 2:
                hidden = hidden + self.pool(hint)
        return (targets.unflatten(1, (-1, self.spread)).mean(2) - hidden).square().mean()


class Reused(nn.Sequential):
    """Layers used in two orders, a random operator of two results, names such as 0.weight and ``input``."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4))

    def forward(self, input: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        first, second, head = self
        hidden = torch.tanh(second(torch.relu(first(input))))
        hidden = second(torch.relu(first(hidden)))
        hidden, _ = torch.native_dropout(first(second(hidden)), 0.0, True)
        return {"hidden": hidden, "loss": nn.functional.cross_entropy(head(hidden), label)}


class Averaging(nn.Module):
    """Computes without gradients: a moving average that is then used, a target, a parameter that never learns."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.offset = nn.Parameter(torch.ones(width))
        self.fixed = nn.Parameter(torch.ones(width))
        self.register_buffer("average", torch.ones(width))
        self.register_buffer("mean_loss", torch.zeros(()))

    def forward(self, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        hidden = self.first(features)
        with torch.no_grad():
            self.average.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            target = self.second(hidden)
            with torch.enable_grad():
                target = target + self.offset
        wave = torch.fft.rfft(self.second(hidden) * self.average + self.fixed.detach() - target)
        low = wave.abs().to(torch.bfloat16)
        low.add_(features[:, :9])  # in place, so it stays of its type
        first_half = low[:2]
        first_half[:, 3:7].mul_(2)
        low[:, 0] = first_half[1].sum()
        loss = nn.functional.cross_entropy(self.head(torch.cat([low.float(), hidden[:, :7]], 1)), label)
        with torch.no_grad():
            self.mean_loss.mul_(0.5).add_(loss)
        return loss


class _Round(torch.autograd.Function):
    """Rounds to 1 / levels; its gradient is that of the identity, halved outside of [-1, 1]."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, levels: int) -> torch.Tensor:
        ctx.save_for_backward(values)
        return (values * levels).round() / levels

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (values,) = ctx.saved_tensors
        return torch.where(values.abs() < 1, gradient, gradient / 2), None


class StraightThrough(nn.Module):
    """Quantised weights and activations, by a Function whose backward is not the derivative of its forward."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 4)

    def forward(self, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = nn.functional.linear(features, _Round.apply(layer.weight, 16), layer.bias)
            features = features + _Round.apply(hidden, 8)
        return nn.functional.cross_entropy(self.head(features), label)


class Twins(nn.Module):
    """Two embeddings of one shape, each its own, and between them so much without parameters that it fills a stage."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(256, width), nn.Embedding(256, width)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.first(input_ids)
        for _ in range(8):
            weights = torch.softmax(hidden @ hidden.mT, dim=-1)
            hidden = nn.functional.layer_norm(hidden + weights @ hidden, hidden.shape[-1:])
        logits = hidden @ self.second.weight.mT + self.second(input_ids).sum(-1, keepdim=True)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TwoLosses(nn.Module):
    """Two means over the same labels, one of them of an early layer; and a constant."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.early, self.late = nn.Linear(width, 256), nn.Linear(width, 256)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.first(self.embedding(input_ids))) * torch.tensor([0.9], device=input_ids.device)
        early = self.early(hidden)
        loss = 0.5 * nn.functional.cross_entropy(early.flatten(0, 1), labels.flatten())
        for _ in range(4):
            hidden = hidden + torch.tanh(self.second(hidden))
        logits = self.late(hidden)
        loss = loss + nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "early": early}


TEXT = DataSettings(
    source="text",
    files=(argparse.__file__,),  # without a file, every rank would read the whole standard library
    sequence_length=SEQUENCE,
    vocabulary_size=256,
    inputs={"input_ids": InputField(kind="tokens"), "labels": InputField(kind="tokens")},
)
FEATURES = DataSettings(
    source="synthetic",
    files=(),
    sequence_length=1,
    vocabulary_size=2,
    inputs={"features": InputField(kind="normal", shape=(16,)), "label": InputField(kind="integers", shape=(), high=4)},
)
GUIDED = replace(
    FEATURES,
    inputs={
        name: InputField(kind="normal", shape=(size,))
        for name, size in (("features", 16), ("hint", 4096), ("targets", 8192))
    },
)
PAIRS = replace(TEXT, inputs={**TEXT.inputs, "next_sentence_label": InputField(kind="integers", high=2)})
REUSED = replace(FEATURES, inputs={"input": FEATURES.inputs["features"], "label": FEATURES.inputs["label"]})
IMAGES = DataSettings(
    source="synthetic",
    files=(),
    sequence_length=1,
    vocabulary_size=2,
    inputs={
        "pixel_values": InputField(kind="normal", shape=(3, 32, 32)),
        "labels": InputField(kind="integers", shape=(), high=2),
    },
)
MODELS = {
    "gpt2": (gpt2, TEXT),
    "gpt2-dropout": (partial(gpt2, 0.1), TEXT),
    "bert": (bert, TEXT),
    "llama": (llama, TEXT),
    "llama-tied": (llama_with_tied_embeddings, TEXT),
    "bert-pretraining": (bert_for_pretraining, PAIRS),
    "t5": (t5, TEXT),
    "vit": (vit, IMAGES),
    "swin": (swin, IMAGES),
    "resnet": (small_resnet, IMAGES),
    "residual": (Residual, FEATURES),
    "reused": (Reused, REUSED),
    "averaging": (Averaging, FEATURES),
    "straight-through": (StraightThrough, FEATURES),
}
KINDS = ("gpt2", "t5", "swin", "residual", "reused", "averaging", "straight-through")  # each is captured differently
OTHERS = tuple(model for model in MODELS if model not in KINDS)
TOKENS = replace(TEXT, source="synthetic")
TRAINED = MODELS | {  # by the parity tests alone
    "bert-dropout": (partial(bert, DROPOUT), TOKENS),
    "t5-dropout": (partial(t5, 0.1), TOKENS),
    "vit-dropout": (partial(vit, DROPOUT), IMAGES),
    "resnet-transformers": (resnet_of_transformers, IMAGES),
    "twins": (Twins, TOKENS),
    "two-losses": (TwoLosses, TOKENS),
    "guided": (Guided, GUIDED),
}
# For tensor parallelism: 4 heads, 2 of keys and values in LLaMA, and a vocabulary that neither 2 nor 4 divides. Where
# there is dropout, it is on activations that all ranks of a group have, as those of heads are split.
ODD_VOCABULARY = replace(TOKENS, vocabulary_size=255)
FOUR_HEADS = {"num_attention_heads": 4, "vocab_size": 255}
GPT2_OF_FOUR_HEADS = {"n_head": 4, "vocab_size": 255}
OUTSIDE_OF_HEADS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0}
TRAINED |= {
    "gpt2-4-heads": (partial(gpt2, **GPT2_OF_FOUR_HEADS), ODD_VOCABULARY),
    "bert-4-heads": (partial(bert, **FOUR_HEADS), ODD_VOCABULARY),
    "t5-4-heads": (partial(t5, num_heads=4, d_kv=8, vocab_size=255), ODD_VOCABULARY),
    "vit-4-heads": (partial(vit, patch_size=10, num_attention_heads=4), IMAGES),  # 10 tokens, which 2 divides
    "swin-4-heads": (partial(swin, embed_dim=16, num_heads=[4, 4]), IMAGES),
    "llama-grouped-query": (partial(llama, num_key_value_heads=2, **FOUR_HEADS), ODD_VOCABULARY),
    "gpt2-4-heads-dropout": (partial(gpt2, 0.1, attn_pdrop=0.0, **GPT2_OF_FOUR_HEADS), ODD_VOCABULARY),
    "bert-4-heads-dropout": (partial(bert, OUTSIDE_OF_HEADS, **FOUR_HEADS), ODD_VOCABULARY),
    "vit-4-heads-dropout": (partial(vit, OUTSIDE_OF_HEADS, patch_size=10, num_attention_heads=4), IMAGES),
}
# For memory: the same families at sizes at which tensors of activations and weights outweigh all others.
WIDE_TOKENS = replace(TOKENS, sequence_length=64, vocabulary_size=512)
WIDE = {"hidden_size": 96, "num_attention_heads": 4, "vocab_size": 512}
TRAINED |= {
    "gpt2-wide": (partial(gpt2, n_embd=96, n_head=4, n_positions=64, vocab_size=512), WIDE_TOKENS),
    "bert-wide": (partial(bert, intermediate_size=384, **WIDE), WIDE_TOKENS),
    "t5-wide": (partial(t5, d_model=96, d_ff=384, num_heads=4, d_kv=24, vocab_size=512), WIDE_TOKENS),
    "llama-wide": (partial(llama, num_key_value_heads=2, intermediate_size=256, **WIDE), WIDE_TOKENS),
    "vit-wide": (partial(vit, hidden_size=96, num_attention_heads=4, intermediate_size=384, patch_size=4), IMAGES),
}
LOW_PRECISION = {  # name -> (model, precision), for models that are trained under autocast
    f"{model}@bfloat16": (model, "bfloat16")
    for model in (
        *("gpt2", "gpt2-dropout", "llama", "t5", "bert", "vit", "resnet-transformers", "residual", "averaging"),
        *("gpt2-wide", "bert-wide", "llama-wide"),
        *("gpt2-4-heads", "bert-4-heads", "t5-4-heads", "llama-grouped-query"),
    )
}
TRAINED |= {name: TRAINED[model] for name, (model, _) in LOW_PRECISION.items()}


def precision_of(model: str) -> str:
    return LOW_PRECISION[model][1] if model in LOW_PRECISION else "float32"


DEVICE = os.environ.get("AUTO3D_TEST_DEVICE", "cpu")  # the device that models are captured for; tests/cuda sets it


@cache
def captured(model: str, micro_batch_size: int) -> CapturedModel:
    """The captured model, which the workers of the suite share: one of them captures it, the others load it."""
    build, data = TRAINED[model]
    shared = Cache()
    identity = {"model": model, "samples": micro_batch_size, "device": DEVICE, "captured by": capture.__qualname__}
    made = shared.load(identity, partial(captured_from_json, build=build))
    if made is None:
        made = capture(build, data.input_specs(), micro_batch_size, device=DEVICE, precision=precision_of(model))
        with suppress(NotStorableError):
            shared.store(identity, captured_to_json(made))
    kept.captures.append(made)
    return made


def num_captures() -> int:
    """How many captures this process keeps, those that ``CapturedModel.at`` made and derived programs included."""
    every = [each for model in kept.captures for each in (model, *model._others.values())]
    return sum(1 + len(model.derived) for model in every)
