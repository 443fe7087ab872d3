"""Programs captured in low precision compute what the module computes under torch.autocast."""

import logging
from itertools import product
from unittest.mock import patch

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM

from auto3d.capture.graph_json import graph_from_json, graph_to_json
from auto3d.capture.model import capture
from auto3d.derived.shards import tensor_parallel
from auto3d.runtime.verify.eager import check_against_eager
from auto3d.runtime.verify.shards import check_shards
from auto3d.share import Share
from tests.models import SIZES, TOKENS, TRAINED, captured
from tests.soak import soak

MODELS = ("gpt2-dropout", "llama", "t5-dropout", "bert", "vit", "resnet", "residual", "averaging")
IN_BOTH = ("bert", "averaging")  # bfloat16 has every model; its autocast differs from float16's in the type alone
OTHERS = [model for model in MODELS if model not in IN_BOTH]
PRECISIONS = ("bfloat16", "float16")
TRAINED_SO = ("gpt2-dropout", "t5-dropout", "vit")  # tests/distributed/test_precision.py trains them in bfloat16
FIRST = [*((model, "bfloat16") for model in MODELS if model not in TRAINED_SO), *product(IN_BOTH, ["float16"])]
CASES = [*FIRST, *soak(*product(TRAINED_SO, ["bfloat16"]), *product(OTHERS, ["float16"]))]
SIZED = [("bert", "bfloat16"), ("averaging", "float16")]
AT_ANOTHER_SIZE = [*SIZED, *soak(*(case for case in product(MODELS, PRECISIONS) if case not in SIZED))]


@pytest.mark.parametrize(("model", "precision"), CASES)
def test_equals_the_module_under_autocast(model, precision):
    build, data = TRAINED[model]
    shared = f"{model}@{precision}"
    found = captured(shared, 2) if shared in TRAINED else capture(build, data.input_specs(), 2, precision=precision)
    check_against_eager(found, data, seed=1, device=torch.device("cpu"))


LAYERS = 2
OF_EXPERTS = {
    **SIZES,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "vocab_size": 256,
}


def mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(MixtralConfig(use_cache=False, **OF_EXPERTS))


def gpt_oss() -> GptOssForCausalLM:
    return GptOssForCausalLM(GptOssConfig(use_cache=False, head_dim=8, sliding_window=8, **OF_EXPERTS))


@pytest.mark.parametrize("build", [mixtral, gpt_oss])
def test_experts_equal_the_module_under_autocast_whose_other_code_takes_its_eager_branches(build, caplog):
    with patch.object(torch.export, "export", wraps=torch.export.export) as traced:
        found = capture(build, TOKENS.input_specs(), 2, precision="bfloat16")
    assert traced.call_count == 1
    logged = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not logged, "torch logs its first attempt, at a kernel that takes no float32 while it is traced"
    check_against_eager(found, TOKENS, seed=1, device=torch.device("cpu"))
    attentions = found.exported.program.find_nodes(
        op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
    )
    assert all(node.kwargs["enable_gqa"] for node in attentions), "as in eager mode, which copies no keys"
    assert len(attentions) == (LAYERS if build is mixtral else 0)


@pytest.mark.parametrize(("model", "precision"), AT_ANOTHER_SIZE)
def test_another_size_has_the_same_precision(model, precision):
    build, data = TRAINED[model]
    assert capture(build, data.input_specs(), 2, precision=precision).at(3).exported.precision == precision


def test_products_read_a_copy_and_embeddings_the_weight():
    graph = captured("gpt2@bfloat16", 2).graph
    assert graph_from_json(graph_to_json(graph)) == graph
    tied = {node.operator: node.copies for node in graph.nodes if "transformer.wte.weight" in node.state}
    assert tied == {"aten.embedding.default": (), "aten.linear.default": ("transformer.wte.weight",)}
    assert {value.dtype for value in graph.copies.values()} == {"bfloat16"}
    assert {value.dtype for value in graph.parameters.values()} == {"float32"}
    assert not [node for node in graph.nodes if "_to_copy" in node.operator and node.state], "weights are not cast"


@pytest.mark.parametrize("model", [*soak("gpt2-4-heads"), "llama-grouped-query"])
def test_the_ranks_of_a_tensor_parallel_group_compute_what_the_whole_program_computes(model):
    build, data = TRAINED[model]
    whole = capture(build, data.input_specs(), 2, precision="bfloat16")
    model_of_ranks = tensor_parallel(whole, Share(tp=2))
    assert model_of_ranks.split == tensor_parallel(captured(model, 2), Share(tp=2)).split
    check_shards(model_of_ranks, data, seed=1, device=torch.device("cpu"))
