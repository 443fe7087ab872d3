"""Weights and configuration from a folder of save_pretrained: exact or refused, and each rank reads its own alone."""

from json import dumps, loads
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from auto3d.capture.graph import Graph
from auto3d.partition.methods.uniform import uniform
from auto3d.partition.stage import cut
from auto3d.runtime.weights.files import Weights
from auto3d.runtime.weights.materialize import materialize
from launch.model.build import build_function, captured_model
from launch.model.initial_weights import initial_weights
from launch.recipe.error import RecipeError
from launch.recipe.load import load
from tests.distributed.parity import SGD, make_plan, run_rank
from tests.models import captured, gpt2

RECIPE = """
model: {weights: stored}
data: {sequence_length: 16}
training: {global_batch: 8, iterations: 2}
plan: {pp: 2, micro_batch_size: 2}
"""
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": 256, "use_cache": False}


def store(folder: Path) -> GPT2LMHeadModel:
    (folder / "own.yaml").write_text(RECIPE)
    torch.manual_seed(9)
    model = GPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0, activation_function="relu"))
    model.save_pretrained(folder / "stored", max_shard_size="40KB")
    return model


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Graph:
    """Of the stored model, captured once: the weights of each test are compared with it."""
    folder = tmp_path_factory.mktemp("graph")
    store(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        return captured_model(load("own.yaml"), 2).graph


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = store(tmp_path)
    assert len(list((tmp_path / "stored").glob("*.safetensors"))) > 2
    return model


def weights_of(graph: Graph | None, *overrides: str) -> Weights:
    """For a model of this ``graph``, or of one that is captured."""
    recipe = load("own.yaml", overrides)
    weights = initial_weights(recipe, graph or captured_model(recipe, 2).graph)
    assert weights is not None
    return weights


def test_architecture_and_configuration_come_from_the_folder(stored, graph):
    recipe = load("own.yaml", ["model.config.n_inner=32"])
    assert recipe.values.model.architecture == "GPT2LMHeadModel"
    config = build_function(recipe)().config
    assert (config.n_layer, config.activation_function, config.n_inner) == (2, "relu", 32)
    weights = weights_of(graph)
    for name, parameter in stored.named_parameters():
        assert torch.equal(weights[name], parameter), name


def test_the_prefix_of_a_model_without_a_head(stored, graph, tmp_path):
    stored.transformer.save_pretrained("stored")  # wte.weight for transformer.wte.weight
    (tmp_path / "stored" / "model.safetensors.index.json").unlink()
    weights = weights_of(graph, "model.architecture=GPT2LMHeadModel")
    assert torch.equal(weights["transformer.wte.weight"], stored.transformer.wte.weight)
    with pytest.raises(RecipeError, match=r"model.weights: found 'stored', which lacks the parameter score\.weight"):
        weights_of(
            None,
            "model.architecture=GPT2ForSequenceClassification",
            "model.config.pad_token_id=0",
            "data.inputs={input_ids: {kind: tokens}, labels: {kind: integers}}",
        )


def test_stored_in_bfloat16_they_become_float32(stored, graph):
    GPT2LMHeadModel.from_pretrained("stored", dtype=torch.bfloat16).save_pretrained("half")
    weights, names = weights_of(graph, "model.weights=half"), [name for name, _ in stored.named_parameters()]
    build = build_function(load("own.yaml", ["model.weights=half"]))
    for name, tensor in materialize(build, names, seed=1, state=weights).items():
        assert tensor.dtype is torch.float32
        assert torch.equal(tensor, stored.get_parameter(name).bfloat16().float()), name


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "it has neither model.safetensors nor"),
        (lambda folder: next(folder.glob("*-00002-*")).unlink(), "not a readable safetensors file: No such file"),
        (lambda folder: next(folder.glob("*-00002-*")).write_bytes(b"abc"), "not a readable safetensors file: "),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "bert"}'), "names no model class"),
        (lambda folder: outside(folder), "is not the name of a file in this folder"),
        (lambda folder: quantised(folder), "is quantised: it takes float32"),
    ],
)
def test_what_is_refused(stored, graph, tmp_path, damage, problem):
    damage(tmp_path / "stored")
    with pytest.raises(RecipeError, match=f"model.weights: found 'stored'.*{problem}") as caught:
        weights_of(graph)
    assert "\n" not in str(caught.value)


def outside(folder) -> None:
    index = folder / "model.safetensors.index.json"
    content = loads(index.read_text())
    content["weight_map"]["transformer.wte.weight"] = "../other.safetensors"
    index.write_text(dumps(content))


def quantised(folder) -> None:
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}, file)


def test_a_pickle_is_refused_with_the_way_out(stored, graph, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "stored" / "config.json").rename(tmp_path / "old" / "config.json")
    torch.save({}, tmp_path / "old" / "pytorch_model.bin")
    with pytest.raises(RecipeError, match=r"is a pickle, which could run any code; convert it where you trust it"):
        weights_of(graph, "model.weights=old")


def count_bytes(world, plan, folder) -> tuple[int, dict]:
    weights = Weights(folder)
    run = run_rank(world, "gpt2", plan, SGD, state=weights, iterations=1)
    return weights.bytes_read, run["history"][0]["parameters"]


def test_a_rank_reads_its_own_stage_alone(processes, tmp_path):
    torch.manual_seed(4)
    gpt2().save_pretrained(tmp_path, max_shard_size="20KB")
    graph = captured("gpt2", 2).graph
    plan = make_plan("gpt2", dp=1, pp=4, stages=uniform(graph, 4))
    ranks = processes.run(4, count_bytes, plan, tmp_path)
    for stage, (read, _) in zip(cut(graph, plan.stages), ranks, strict=True):
        held = sum(graph.parameters[name].bytes for name in stage.state if name in graph.parameters)
        assert held <= read <= 1.05 * held
    plan = make_plan("gpt2", dp=1, tp=2, pp=2)
    for read, _ in processes.run(4, count_bytes, plan, tmp_path):
        assert read < 0.7 * sum(read for read, _ in ranks)
