"""Whole families of transformers run on several ranks as on one, by the derivation alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers
from torch import nn

from auto3d.capture.model import CapturedModel, capture
from auto3d.data import DataSettings
from auto3d.derived.explain import explain
from auto3d.derived.model import Derived
from auto3d.derived.shards import tensor_parallel
from auto3d.runtime.verify.shards import check_shards
from auto3d.share import Share
from tests.models import IMAGES, NO_DROPOUT, TEXT
from tests.soak import soak

OURS = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BERTS = OURS | NO_DROPOUT | {"intermediate_size": 64}
DECODERS = OURS | {"intermediate_size": 64, "use_cache": False, "pad_token_id": 0}
GROUPED = DECODERS | {"num_key_value_heads": 2}
NO_DECODER_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
IMAGE = {"image_size": 32, "patch_size": 8, "num_labels": 2}


def model(name: str, head: str, **sizes: object) -> Callable[[], nn.Module]:
    """What builds the model ``name`` of transformers."""
    config = getattr(transformers, f"{name}Config")
    return lambda: getattr(transformers, f"{name}For{head}")(config(**sizes))


def without(sizes: dict, *names: str) -> dict:
    return {name: value for name, value in sizes.items() if name not in names}


LANGUAGE = {
    "gpt-neox": model("GPTNeoX", "CausalLM", **DECODERS, **NO_DECODER_DROPOUT),
    "bloom": model(
        "Bloom", "CausalLM", vocab_size=256, hidden_size=32, n_layer=2, n_head=4, use_cache=False, **NO_DECODER_DROPOUT
    ),
    "falcon": model("Falcon", "CausalLM", **OURS, use_cache=False, **NO_DECODER_DROPOUT),
    "falcon, new": model(
        "Falcon",
        "CausalLM",
        **OURS,
        num_kv_heads=2,
        new_decoder_architecture=True,
        use_cache=False,
        **NO_DECODER_DROPOUT,
    ),
    "phi-3": model("Phi3", "CausalLM", **GROUPED),
    "opt": model(
        "OPT",
        "CausalLM",
        **OURS,
        ffn_dim=64,
        word_embed_proj_dim=32,
        max_position_embeddings=64,
        dropout=0.0,
        use_cache=False,
    ),
    "qwen-2": model("Qwen2", "CausalLM", **GROUPED),
    "qwen-3": model("Qwen3", "CausalLM", **GROUPED, head_dim=8),
    "gemma-2": model("Gemma2", "CausalLM", **GROUPED, head_dim=8),
    "mistral": model("Mistral", "CausalLM", **GROUPED),
    "mixtral": model("Mixtral", "CausalLM", **GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen-3, experts": model(
        "Qwen3Moe", "CausalLM", **GROUPED, head_dim=8, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    ),
    "gpt-j": model(
        "GPTJ",
        "CausalLM",
        vocab_size=256,
        n_embd=32,
        n_layer=2,
        n_head=4,
        rotary_dim=4,
        n_positions=64,
        use_cache=False,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "gpt-neo": model(
        "GPTNeo",
        "CausalLM",
        vocab_size=256,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
        use_cache=False,
        **dict.fromkeys(("resid_dropout", "embed_dropout", "attention_dropout"), 0.0),
    ),
    "electra": model("Electra", "MaskedLM", **BERTS, embedding_size=32),
    "roberta": model("Roberta", "MaskedLM", **BERTS),
    "distilbert": model(
        "DistilBert",
        "MaskedLM",
        vocab_size=256,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    "albert": model("Albert", "MaskedLM", **BERTS, embedding_size=16),
    "deberta": model(
        "DebertaV2",
        "MaskedLM",
        **BERTS,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        max_position_embeddings=64,
    ),
    "bart": model(
        "Bart",
        "ConditionalGeneration",
        vocab_size=256,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        dropout=0.0,
        use_cache=False,
    ),
}
FAMILIES: dict[str, tuple[Callable[[], nn.Module], DataSettings]] = {
    **{name: (build, TEXT) for name, build in LANGUAGE.items()},
    "deit": (model("DeiT", "ImageClassification", **without(BERTS, "vocab_size"), **IMAGE), IMAGES),
}
OTHERS: dict[str, tuple[Callable[[], nn.Module], DataSettings]] = {
    "convnext": (
        model("ConvNext", "ImageClassification", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, num_labels=2),
        IMAGES,
    ),
    "mamba": (
        model("Mamba", "CausalLM", vocab_size=256, hidden_size=32, num_hidden_layers=1, state_size=4, use_cache=False),
        replace(TEXT, sequence_length=4),  # its program has operations for every position
    ),
}


@cache
def captured(family: str) -> tuple[CapturedModel, DataSettings]:
    build, data = (FAMILIES | OTHERS)[family]
    return capture(build, data.input_specs(), 2), data


def checked(family: str, shards: int, *, sequence_parallel: bool = False) -> Derived:
    """The model on ``shards`` ranks, after one micro-batch of it equalled that of one process."""
    whole, data = captured(family)
    found = tensor_parallel(whole, Share(tp=shards, sequence_parallel=sequence_parallel))
    check_shards(found, data, seed=3, device=torch.device("cpu"))
    return found


ALIKE = ("falcon", "qwen-2", "qwen-3", "mistral", "gpt-neo", "electra", "roberta", "distilbert")


@pytest.mark.parametrize("family", [*(family for family in FAMILIES if family not in ALIKE), *soak(*ALIKE)])
def test_a_family_runs_on_two_ranks(family):
    explanation = explain(checked(family, 2))
    assert explanation.split_flops > 0.99
    assert explanation.split_bytes > 0.95


@pytest.mark.parametrize("family", OTHERS)
def test_other_models_run_on_two_ranks(family):
    assert explain(checked(family, 2)).split_bytes > 0.95


@pytest.mark.parametrize(
    ("family", "shards", "sequence_parallel"),
    [
        ("gpt-neox", 4, False),
        ("falcon, new", 2, True),
        ("gemma-2", 4, False),
        ("bart", 2, True),
        ("deberta", 2, True),
        *soak(("gpt-neox", 2, True), ("falcon, new", 4, False), ("gemma-2", 2, True), ("bart", 4, False)),
        *soak(("deberta", 4, False), ("phi-3", 4, False), ("phi-3", 2, True)),
    ],
)
def test_a_family_runs_on_more_ranks_and_on_split_sequences(family, shards, sequence_parallel):
    assert explain(checked(family, shards, sequence_parallel=sequence_parallel)).split_flops > 0.85


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES | OTHERS)
@pytest.mark.parametrize(("shards", "sequence_parallel"), [(4, False), (2, True), (4, True)])
def test_every_family_runs_on_more_ranks_and_on_split_sequences(family, shards, sequence_parallel):
    checked(family, shards, sequence_parallel=sequence_parallel)
