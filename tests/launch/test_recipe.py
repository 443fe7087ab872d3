"""Recipes: what is right loads, what is wrong is refused in one line with exit code 2."""

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from launch import main as command
from launch.recipe import RECIPES, RecipeError, load, save
from launch.schema import documented_keys, group_schema, groups

GPT2 = """
model:
  architecture: GPT2LMHeadModel
  config: {n_layer: 2, n_head: 2, n_embd: 32, n_positions: 32, vocab_size: 256, bos_token_id: 0, eos_token_id: 0}
data: {sequence_length: 32}
training: {global_batch: 8}
plan: {dp: 1, pp: 2, micro_batch_size: 2}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(GPT2)
    return tmp_path


def run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["auto3d", *arguments])
    with pytest.raises(SystemExit) as caught:
        command.main()
    return caught.value.code


BAD = [  # overrides of small.yaml, and words that the message must hold
    (["training.globl_batch=4"], ["command line", "training.globl_batch", "did you mean global_batch"]),
    (["trainng.global_batch=4"], ["trainng", "did you mean training"]),
    (["training.global_batch=many"], ["training.global_batch", "'many'", "a whole number of at least 1"]),
    (["training.global_batch=0"], ["training.global_batch", "found 0", "at least 1"]),
    (["training.learning_rate=nan"], ["training.learning_rate", "nan", "a number of at least 0"]),
    (["training.global_batch=7"], ["global_batch: 7", "multiple of 1 × 2 = 2"]),
    (["training.betas=[0.9]"], ["training.betas", "[0.9]", "two numbers"]),
    (["training.optimizer=lion"], ["training.optimizer", "'lion'", "adamw, sgd"]),
    (["plan.dp=4"], ["dp × tp × pp = 4 × 1 × 2 needs 8 devices", "1 × 4 = 4"]),
    (["plan.tp=2"], ["plan.tp", "found 2", "it takes 1"]),
    (["plan.schedule=zigzag"], ["plan.schedule", "'zigzag'", "gpipe, 1f1b"]),
    (["search.dp=2"], ["search.dp", "found 2", "auto or a list of whole numbers"]),
    (["search.pp=[1.5]"], ["search.pp", "[1.5]"]),
    (["search.schedule=[gpip]"], ["search.schedule", "gpip", "gpipe, 1f1b"]),
    (["search.micro_batch_size=[]"], ["search.micro_batch_size", "[]"]),
    (["search.allow_idle_devices=perhaps"], ["search.allow_idle_devices", "'perhaps'", "true or false"]),
    (["cluster=summit"], ["cluster", "'summit'", "laptop"]),
    (["cluster.device=tpu"], ["cluster.device", "'tpu'", "cpu, cuda"]),
    (["data.files=[missing-*.txt]"], ["data.files", "missing-*.txt", "no such file"]),
    (["data.inputs.labels.kind=next"], ["data.inputs.labels.kind", "'next'", "next-tokens"]),
    (["data.inputs.labels.shap=[1]"], ["data.inputs.labels.shap", "did you mean shape"]),
    (["data.sequence_length=64"], ["data.sequence_length", "found 64", "32 positions"]),
    (["model.factory=a:b"], ["model", "both", "either architecture or factory"]),
    (
        ["model.architecture=GPT3LMHeadModel"],
        ["model.architecture", "'GPT3LMHeadModel'", "did you mean GPT2LMHeadModel"],
    ),
    (["model.config.n_layers=3"], ["model.config.n_layers", "did you mean n_layer"]),
    (["model.config.n_layer=abc"], ["model.config", "refused by GPT2LMHeadModel", "n_layer"]),
    (["model.config.vocab_size=100"], ["model.config.vocab_size", "found 100", "256"]),
    (["model.weights=none.safetensors"], ["model.weights", "none.safetensors", "no such file"]),
    (["model.weights=small.yaml"], ["model.weights", "not a safetensors file"]),
    (["model.architecture=null", "model.factory=nowhere:make"], ["model.factory", "nowhere", "cannot be imported"]),
    (["model.architecture=null", "model.factory=os"], ["model.factory", "package.module:function"]),
    (["training.seed=${nothing}"], ["training.seed", "nothing"]),
    (["training"], ["command line", "group.key=value"]),
    (["training=4"], ["training", "found 4", "the keys of this group"]),
    (["cluster.device=cuda"], ["cluster.device", "'cuda'", "this machine has 0"]),
]


@pytest.mark.parametrize(("overrides", "words"), BAD, ids=[" ".join(overrides) for overrides, _ in BAD])
def test_bad_recipes_are_refused_in_one_line(folder, monkeypatch, capsys, overrides, words):
    assert run(monkeypatch, "train", "small.yaml", *overrides) == 2
    message = capsys.readouterr().err
    assert message.startswith("auto3d: ")
    assert message.count("\n") == 1
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training: {global_batch: 8", ["bad.yaml", "line 2", "not YAML"]),
        ("- a\n- b", ["bad.yaml", "holds a list"]),
        ("training: {seed: x}", ["bad.yaml: training.seed", "'x'", "whole number"]),
        ("model: {architecture: GPT2LMHeadModel}\ndata:", ["bad.yaml: data", "None"]),
        ("data: {source: text}", ["bad.yaml: model", "neither"]),
        ("model: tiny-model", ["bad.yaml: model", "'tiny-model'", "gpt2-tiny"]),
        ("model: own.yaml", ["own.yaml: model.architectur", "did you mean architecture"]),
    ],
)
def test_the_message_names_the_file(folder, monkeypatch, capsys, text, words):
    (folder / "bad.yaml").write_text(text)
    (folder / "own.yaml").write_text("architectur: GPT2LMHeadModel")
    assert run(monkeypatch, "plan", "bad.yaml") == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "tinny"], ["no such recipe", "did you mean tiny"]),
        (["plan", "none/none.yaml"], ["no such recipe"]),
        (["table", "small.yaml"], ["no finished trial", "auto3d sweep"]),
        (["train", "small.yaml", "--plan", "none.json"], ["none.json", "does not exist"]),
        (["train", "small.yaml", "--plan", "small.yaml"], ["small.yaml", "Invalid JSON"]),
        (["trian", "small.yaml"], ["trian"]),
        (["train"], ["RECIPE"]),
    ],
)
def test_bad_commands(folder, monkeypatch, capsys, arguments, words):
    assert run(monkeypatch, *arguments) == 2
    message = capsys.readouterr().err
    for word in words:
        assert word in message


def test_no_plan_in_recipe_and_no_plan_file(folder, monkeypatch, capsys):
    (folder / "planless.yaml").write_text(GPT2[: GPT2.index("plan:")])
    assert run(monkeypatch, "train", "planless.yaml") == 2
    assert "--plan FILE" in capsys.readouterr().err


def test_overrides_win_over_the_file_and_the_file_over_defaults(folder):
    values = load(
        "small.yaml", ["training.global_batch=32", "model.config.n_layer=6", "plan.micro_batch_size=4"]
    ).values
    assert values.training.global_batch == 32
    assert values.model.config["n_layer"] == 6
    assert values.model.config["n_embd"] == 32
    assert values.plan.schedule == "1f1b"


def test_named_groups_can_be_changed_key_by_key(folder):
    values = load("tiny", ["cluster.devices_per_node=8", "model.config.n_layer=2"]).values
    assert values.cluster.devices_per_node == 8
    assert values.model.config["n_layer"] == 2
    assert values.model.config["n_embd"] == 128


def test_values_may_refer_to_each_other(folder):
    (folder / "linked.yaml").write_text(
        GPT2.replace("sequence_length: 32", "sequence_length: '${model.config.n_positions}'")
    )
    assert load("linked.yaml").values.data.sequence_length == 32


def test_saved_recipe_loads_to_the_same(folder):
    for name in ("tiny", "small.yaml"):
        loaded = load(name, ["data.inputs.input_ids.kind=tokens"])
        save(loaded.values, folder / "saved.yaml")
        assert load("saved.yaml").values == loaded.values


def test_every_key_is_documented():
    known = {name for name, *_ in documented_keys()}
    for group in groups():
        assert {f"{group}.{item.name}" for item in fields(group_schema(group))} <= known
    assert all(meaning and takes for _, _, takes, meaning in documented_keys())


@pytest.mark.parametrize("file", sorted(RECIPES.rglob("*.yaml")), ids=lambda file: file.stem)
def test_every_key_of_a_shipped_recipe_is_commented(file: Path):
    """Keys of the schema; not those of a model's own configuration."""
    names = {name.split(".")[1] for name, *_ in documented_keys()}
    for line in file.read_text().splitlines():
        key, separator, rest = line.strip().partition(":")
        if separator and key in names and key != "config" and file.parent.name != "models":
            assert "#" in rest, line


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_recipes_load(file: Path):
    load(str(file))


def test_errors_found_later_name_the_file_too():
    assert str(load("tiny").error("data.sequence_length", "x")).endswith("tiny.yaml: data.sequence_length: x")
    assert "gpt2-tiny.yaml" in str(load("tiny").error("model.config", "x"))
    assert isinstance(load("tiny").error("model", "x"), RecipeError)
