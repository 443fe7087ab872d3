"""Rules become splits that follow the graph: fused weights in blocks, heads whole, biases with their weights."""

import re
from functools import cache

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from auto3d.capture.export import InputSpec
from auto3d.capture.model import CapturedModel, capture
from auto3d.capture.skeleton import skeleton
from auto3d.derived.planned_split import planned_split, ruled_reasons
from auto3d.derived.shards import tensor_parallel
from auto3d.errors import InputError
from auto3d.share import Share
from auto3d.tensor.known_rules import RULES, SHIPPED, STYLES
from auto3d.tensor.weight_rules import RuledSplits, known_rules, weight_splits, weight_uses
from auto3d.tensor_placement import COPIED, WHOLE, Split
from tests import models

HEADS, WIDTH = 8, 32
SIZES = {
    "vocab_size": 250, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
FUSED = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=64)),
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, intermediate_size=64)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, num_key_value_heads=2, intermediate_size=64)),
    "falcon": lambda: FalconForCausalLM(FalconConfig(**SIZES, new_decoder_architecture=True, num_kv_heads=4)),
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=250, hidden_size=WIDTH, n_layer=1, n_head=HEADS, use_cache=False)
    ),
}


@cache
def fused(name: str) -> CapturedModel:
    tokens = InputSpec(shape=(16,), dtype=torch.int64)
    return capture(FUSED[name], {"input_ids": tokens, "labels": tokens}, 2)


def splits_of(captured: CapturedModel, shards: int, rules: dict[str, str] | None = None) -> dict[str, Split]:
    known = known_rules(skeleton(captured.exported.build).model)
    return weight_splits(captured, shards, rules=rules or {}, known=known).splits


def described(splits: dict[str, Split], layer: str) -> dict[str, tuple]:
    """The splits of one layer's parameters, by the rest of their names."""
    return {n.removeprefix(layer): (s.dim, s.blocks) for n, s in splits.items() if n.startswith(layer)}


def test_shipped_rules_split_gpt2_as_megatron_does():
    splits = splits_of(models.captured("gpt2", 2), 2)
    assert described(splits, "transformer.h.3.") == {
        "attn.c_attn.weight": (1, (32, 32, 32)),
        "attn.c_attn.bias": (0, (32, 32, 32)),
        "attn.c_proj.weight": (0, (32,)),
        "mlp.c_fc.weight": (1, (128,)),
        "mlp.c_fc.bias": (0, (128,)),
        "mlp.c_proj.weight": (0, (128,)),
    }
    assert described(splits, "transformer.w") == {"te.weight": (0, (256,))}


@pytest.mark.parametrize("model", ["gpt2", "bert", "t5", "vit", "swin", "llama"])
def test_known_rules_split_every_product_of_every_block(model):
    captured = models.captured(model, 2)
    splits = splits_of(captured, 2)
    whole = {use.weight for use in weight_uses(captured)} - set(splits)
    outside = r"embeddings|wpe|pooler|classifier|transform|downsample|reduction"
    assert not [name for name in whole if not re.search(outside, name)]
    for name, split in splits.items():
        assert split.size == captured.graph.parameters[name].shape[split.dim]


def test_a_plan_of_transformers_counts_before_shipped_rules():
    model = skeleton(fused("llama").exported.build).model
    rules = known_rules(model)
    assert rules["model.layers.*.mlp.up_proj"] == "column"
    assert rules["lm_head"] == rules["model.embed_tokens"] == "vocabulary"
    assert known_rules(skeleton(fused("bloom").exported.build).model) is None
    model.tp_plan["model.layers.*.mlp.up_proj"] = "moe_tp_experts"
    assert known_rules(model) is None, "such a style is no split of a weight"


def test_grouped_query_attention_keeps_heads_that_do_not_divide_whole():
    layer = "model.layers.0.self_attn."
    at_2, at_4 = (described(splits_of(fused("llama"), shards), layer) for shards in (2, 4))
    assert at_2.keys() == {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}
    assert at_4.keys() == {"q_proj.weight", "o_proj.weight"}


def test_fused_weights_have_the_blocks_that_the_model_reads():
    assert described(splits_of(fused("phi3"), 2), "model.layers.0.") == {
        "self_attn.qkv_proj.weight": (0, (32, 8, 8)),
        "self_attn.o_proj.weight": (1, (32,)),
        "mlp.gate_up_proj.weight": (0, (64, 64)),
        "mlp.down_proj.weight": (1, (64,)),
    }
    for name, prefix in (("neox", "gpt_neox.layers.0.attention."), ("bloom", "transformer.h.0.self_attention.")):
        rules = {"*query_key_value": "heads", "*attention.dense": "row"}
        found = described(splits_of(fused(name), HEADS, rules), prefix)
        assert found["query_key_value.weight"] == (0, (3 * WIDTH,)), "query, key and value of a head lie together"
        assert found["query_key_value.bias"] == (0, (3 * WIDTH,))
        assert found["dense.weight"] == (1, (WIDTH,))
    rules = {"*query_key_value": "heads"}
    assert described(splits_of(fused("falcon"), 4, rules), "transformer.h.0.self_attention.query") == {
        "_key_value.weight": (0, (64,))
    }
    with pytest.raises(InputError, match="has 4 heads, which do not divide into 8 shards"):
        splits_of(fused("falcon"), 8, rules)


class Layers(nn.Module):
    """Products in other forms: a transposed weight, a convolution in groups, a bias of its own, a fused gate."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, width))
        self.offset = nn.Parameter(torch.ones(width))
        self.gated = nn.Linear(width, 2 * width)
        self.depthwise = nn.Conv1d(width, width, 3, padding=1, groups=4)
        self.mixed = nn.Conv1d(width, 2 * width, 1)
        self.table = nn.Embedding(7, width)
        self.heads = nn.Linear(width, width)
        self.overlapping = nn.Linear(width, width)

    def forward(self, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        features = self.overlapping(features)
        features = features + features[..., :1]
        hidden = features @ self.weight.T + self.offset
        hidden = hidden + self.table(label)[:, None]
        gate, value = self.gated(hidden).chunk(2, dim=-1)
        hidden = torch.sigmoid(gate) * value
        hidden = self.mixed(self.depthwise(hidden.transpose(1, 2)))
        per_head = self.heads(hidden.transpose(1, 2)[..., :16]).view(*features.shape[:2], 2, 8).transpose(1, 2)
        return torch.softmax(per_head, dim=-1).mean() + hidden[:, 16:].mean()


@cache
def layers() -> CapturedModel:
    inputs = {
        "features": InputSpec(shape=(4, 16), dtype=torch.float32),
        "label": InputSpec(shape=(), dtype=torch.int64),
    }
    return capture(Layers, inputs, 2)


def test_the_dimension_follows_from_the_use_of_the_weight():
    def split(**rules: str) -> dict[str, tuple]:
        return described(weight_splits(layers(), 2, rules=rules).splits, "")

    assert split(**{"": "column"}) == {"weight": (0, (16,)), "offset": (0, (16,))}
    assert split(**{"": "row"}) == {"weight": (1, (16,))}
    assert split(gated="column") == {"gated.weight": (0, (16, 16)), "gated.bias": (0, (16, 16))}
    assert split(mixed="column")["mixed.weight"] == (0, (16, 16)), "its halves go separate ways"
    assert split(mixed="row") == {"mixed.weight": (1, (16,))}
    assert split(depthwise="column") == {"depthwise.weight": (0, (16,)), "depthwise.bias": (0, (16,))}
    assert split(table="vocabulary") == {"table.weight": (0, (7,))}, "padded"
    assert split(table="column") == {"table.weight": (1, (16,))}
    assert split(heads="heads")["heads.weight"] == (0, (16,))
    assert split(heads="heads", **{"h*": "whole"}) == {}, "the last rule counts"


@pytest.mark.parametrize(
    ("rules", "shards", "message"),
    [
        (
            {"layers.*": "row"},
            2,
            "'layers.*' matches no module that multiplies a weight or looks up its rows",
        ),
        ({"table": "row"}, 2, "table is an embedding, which takes vocabulary, column or whole, not row"),
        ({"depthwise": "row"}, 2, "depthwise is a convolution in groups, which takes column or whole, not row"),
        ({"mixed": "vocabulary"}, 2, "mixed is a convolution, which has no vocabulary; it takes column or row"),
        ({"gated": "heads"}, 2, "the result of gated is not divided into heads, so it takes column instead of heads"),
        ({"heads": "heads"}, 4, "heads has 2 heads, which do not divide into 4 shards"),
        ({"heads": "column"}, 4, "heads has 2 heads, which do not divide into 4 shards"),
        ({"gated": "column"}, 3, "gated has 16 output features, which do not divide into 3 shards"),
        ({"gated": "row"}, 3, "gated has 16 input features, which do not divide into 3 shards"),
        (
            {"overlapping": "column"},
            2,
            "the model reads parts of the result of overlapping that overlap; it takes row or whole",
        ),
        ({"depthwise": "column"}, 8, "depthwise has 4 groups, which do not divide into 8 shards"),
    ],
)
def test_impossible_rules_are_refused_with_the_numbers(rules, shards, message):
    with pytest.raises(InputError, match=re.escape(f"tensor_parallel: {message}")):
        weight_splits(layers(), shards, rules=rules)
    known = weight_splits(layers(), shards, rules={}, known=rules)
    assert known.pinned == {}, "a rule that ships says nothing where it is not possible"
    assert list(known.impossible.values()) == ([] if "matches no module" in message else [message])


def test_a_users_rule_counts_before_a_known_one():
    splits = splits_of(models.captured("gpt2", 2), 2, {"*.mlp.c_fc": "whole", "transformer.h.0.mlp.c_proj": "column"})
    assert not [name for name in splits if "c_fc" in name]
    assert splits["transformer.h.0.mlp.c_proj.weight"].dim == 1
    assert splits["transformer.h.1.mlp.c_proj.weight"].dim == 0


def test_rules_of_modules_that_share_a_weight_must_agree():
    with pytest.raises(InputError, match=r"share transformer\.wte\.weight, but their rules split it differently"):
        splits_of(models.captured("gpt2", 2), 2, {"lm_head": "row"})


@pytest.mark.parametrize(
    ("model", "derived"),
    [
        ("gpt2", {"transformer.wpe.weight"}),
        ("bert", {"cls.predictions.transform.dense.weight", "bert.embeddings.position_embeddings.weight"}),
        ("vit", {"vit.embeddings.patch_embeddings.projection.weight"}),
    ],
)
def test_known_rules_fix_what_they_name_and_the_rest_is_derived(model, derived):
    captured = models.captured(model, 2)
    ruled, planned = splits_of(captured, 2), planned_split(captured, Share(tp=2), rules={})
    assert tensor_parallel(captured, Share(tp=2), split=planned).split == planned
    assert ruled.items() <= planned.items()
    assert derived <= planned.keys() - ruled.keys()


def test_derived_splits_fit_a_users_rules():
    """Layer 0 is whole by the rules, and layer 1 splits the input features of what GPT-2's own rules call a column."""
    rules = {"*.h.0.mlp.*": "whole", "*.h.1.mlp.c_fc": "row", "*.h.1.mlp.c_proj": "row"}
    captured = models.captured("gpt2", 2)
    splits = planned_split(captured, Share(tp=2), rules=rules)
    assert not [name for name in splits if ".h.0.mlp." in name]
    assert splits["transformer.h.1.mlp.c_fc.weight"] == Split(0, (32,))
    assert splits["transformer.h.2.mlp.c_fc.weight"] == Split(1, (128,))
    placements = tensor_parallel(captured, Share(tp=2), split=splits).placements
    assert placements["transformer.h.0.mlp.c_fc.weight"] in (WHOLE, COPIED)
    assert ruled_reasons(captured, 2, rules=rules)["transformer.h.0.mlp.c_fc.bias"] == "a rule says so"


def test_a_users_rule_counts_where_a_known_one_for_the_same_weight_disagrees():
    """T5's decoder and head share the encoder's table, whose rows their known rules split."""
    splits = splits_of(models.captured("t5", 2), 2, {"encoder.embed_tokens": "column"})
    assert splits["shared.weight"] == Split(1, (32,))


@pytest.mark.parametrize("is_users", [True, False])
def test_splits_that_no_operation_can_use_are_refused_or_dropped(is_users, monkeypatch):
    name, uneven = "transformer.wte.weight", Split(0, (100, 156))  # an embedding's rows are one block
    by_user = frozenset([name] if is_users else [])
    ruled = RuledSplits(pinned={name: uneven}, by_user=by_user, impossible={})
    monkeypatch.setattr("auto3d.derived.planned_split.weight_splits", lambda *_, **__: ruled)
    if is_users:
        with pytest.raises(InputError, match=rf"^tensor_parallel: {re.escape(name)} cannot be split along dimension 0"):
            planned_split(models.captured("gpt2", 2), Share(tp=2), rules={})
    else:
        assert planned_split(models.captured("gpt2", 2), Share(tp=2), rules={})[name] == Split(0, (256,))


def test_every_word_is_documented():
    assert set(STYLES.values()) < set(RULES)
    assert {word for rules in SHIPPED.values() for word in rules.values()} < set(RULES)
