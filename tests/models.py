"""The small models that tests train: unmodified, built as a user's recipe would."""

from functools import lru_cache

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from auto3d.capture.export import ExportedModel, export
from auto3d.capture.specialize import CapturedModel, specialize
from auto3d.runtime.data import DataSettings, InputField

SEQUENCE = 32


def gpt2(dropout: float = 0.0) -> GPT2LMHeadModel:
    """Tied embedding and head; four layers, so that four stages are possible."""
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=4, n_embd=32, n_head=2, n_positions=SEQUENCE, vocab_size=256, use_cache=False,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def gpt2_with_dropout() -> GPT2LMHeadModel:
    return gpt2(dropout=0.1)


class Residual(nn.Module):
    """Not a language model: a shared input, a shared layer, batch statistics, a skip over many operations."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.shared = nn.Linear(width, width)
        self.normal = nn.BatchNorm1d(width)
        self.activation = nn.ReLU(inplace=True)
        self.head = nn.Linear(width, 4)

    def forward(self, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        hidden = self.shared(self.activation(self.first(features)))
        skip = hidden
        hidden = self.shared(self.activation(self.normal(hidden)))
        return nn.functional.cross_entropy(self.head(hidden + skip + features), label)


TEXT = DataSettings(
    source="text",
    files=(),
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
MODELS = {"gpt2": (gpt2, TEXT), "gpt2-dropout": (gpt2_with_dropout, TEXT), "residual": (Residual, FEATURES)}


@lru_cache
def exported(model: str) -> ExportedModel:
    build, data = MODELS[model]
    return export(build, data.input_specs())


@lru_cache
def captured(model: str, micro_batch_size: int) -> CapturedModel:
    return specialize(exported(model), micro_batch_size)
