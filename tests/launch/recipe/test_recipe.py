"""Valid recipes load; invalid ones are refused in one line, with exit code 2."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from launch.recipe.cluster_schema import AcceleratorRecipe
from launch.recipe.keys import documented_keys, group_schema, groups
from launch.recipe.load import RecipeError, load
from launch.recipe.shipped import RECIPES
from tests.launch.conftest import GPT2, MINE

EMULATED = ["training.compute=emulated"]
BAD = [  # overrides of small.yaml, and words that the message must contain
    (["training.globl_batch=4"], ["command line", "training.globl_batch", "did you mean global_batch"]),
    (["trainng.global_batch=4"], ["trainng", "did you mean training"]),
    (["training.global_batch=many"], ["training.global_batch", "'many'", "a whole number of at least 1"]),
    (["training.global_batch=0"], ["training.global_batch", "found 0", "at least 1"]),
    (["training.learning_rate=nan"], ["training.learning_rate", "nan", "a number of at least 0"]),
    (["training.global_batch=7"], ["global_batch: 7", "multiple of 1 × 2 = 2"]),
    (["training.betas=[0.9]"], ["training.betas", "[0.9]", "two numbers"]),
    (["measure.communication=true"], ["measure.communication", "found true", "search.engine", "deepspeed-zero"]),
    (["training.optimizer=lion"], ["training.optimizer", "'lion'", "adamw, sgd"]),
    (["plan.dp=4"], ["plan", "needs 8 devices; the cluster has 4"]),
    (["plan.tp=3"], ["plan", "needs 6 devices; the cluster has 4"]),
    (["plan.partition=rows"], ["plan.partition", "'rows'", "uniform, blocks"]),
    (["plan.placement=anywhere"], ["plan.placement", "'anywhere'", "megatron"]),
    (["plan.kept=[0.5,1]"], ["plan", "kept: found together with recompute: none", "it belongs to recompute: full"]),
    (["plan.recompute=full", "plan.kept=[0.5]"], ["plan", "kept: found 1 fractions", "one for each of 2 stages"]),
    (["plan.recompute=full", "plan.kept=[0.5,2]"], ["plan.kept", "[0.5, 2", "at least 0"]),
    (["plan.cuts=[0,1]"], ["plan", "cuts: [0, 1] must be 3 rising numbers from 0 to"]),
    (["plan.sequence_parallel=true"], ["plan.sequence_parallel", "found True, but plan.tp is 1", "2 or more"]),
    (["plan.tensor_overlap=sub-pipelined"], ["plan.tensor_overlap", "found 'sub-pipelined', but plan.tp is 1"]),
    (["plan.tensor_overlap=some"], ["plan.tensor_overlap", "'some'", "none, sub-pipelined"]),
    (["search.tensor_overlap=[both]"], ["search.tensor_overlap", "auto or a list of none, sub-pipelined"]),
    (["search.sequence_parallel=[1]"], ["search.sequence_parallel", "auto or a list of false, true"]),
    (
        ["model.tensor_parallel={lm_head: columns}"],
        ["model.tensor_parallel", "'columns'", "names, each with one of column, row, heads, vocabulary, whole"],
    ),
    (["model.tensor_parallel=[row]"], ["model.tensor_parallel", "names, each with one of column"]),
    (
        ["plan.tp=2", "model.tensor_parallel={h.*.mlp: row}"],
        ["plan", "tensor_parallel: 'h.*.mlp' matches no module", "a pattern of this model is transformer.h.*.mlp.c_"],
    ),
    (["plan.schedule=zigzag"], ["plan.schedule", "'zigzag'", "gpipe, 1f1b"]),
    (["search.dp=2"], ["search.dp", "found 2", "auto or a list of whole numbers"]),
    (["search.pp=[1.5]"], ["search.pp", "[1.5]"]),
    (["search.schedule=[gpip]"], ["search.schedule", "gpip", "gpipe, 1f1b"]),
    (["search.micro_batch_size=[]"], ["search.micro_batch_size", "[]"]),
    (["search.micro_batches=[0]"], ["search.micro_batches", "0", "1"]),
    (["search.allow_idle_devices=perhaps"], ["search.allow_idle_devices", "'perhaps'", "true or false"]),
    (["cluster=summit"], ["cluster", "'summit'", "laptop"]),
    (["cluster.device=tpu"], ["cluster.device", "'tpu'", "cpu, cuda"]),
    (["data.files=[missing-*.txt]"], ["data.files", "missing-*.txt", "no such file"]),
    (["data.inputs.labels.kind=next"], ["data.inputs.labels.kind", "'next'", "next-tokens"]),
    (["data.inputs.labels.shap=[1]"], ["data.inputs.labels.shap", "did you mean shape"]),
    (["data.sequence_length=64"], ["data.sequence_length", "found 64", "32 positions"]),
    (["model.factory=a:b"], ["model", "architecture and factory", "one of architecture, factory, layers"]),
    (
        ["model.architecture=GPT3LMHeadModel"],
        ["model.architecture", "'GPT3LMHeadModel'", "did you mean GPT2LMHeadModel"],
    ),
    (["model.config.n_layers=3"], ["model.config.n_layers", "did you mean n_layer"]),
    (["model.config.n_layer=abc"], ["model.config", "refused by GPT2LMHeadModel", "n_layer"]),
    (["model.config.vocab_size=100"], ["model.config.vocab_size", "found 100", "256"]),
    (["training.compute=emulate"], ["training.compute", "'emulate'", "real, emulated"]),
    (["emulation.forward_s=1"], ["emulation", "belongs to training.compute: emulated", "is real: leave it out"]),
    ([*EMULATED, "emulation.forward_s=-1"], ["emulation.forward_s", "-1", "a list with one for each stage", "least 0"]),
    ([*EMULATED, "emulation.backward_s=[1,.nan]"], ["emulation.backward_s", "[1, nan]"]),
    ([*EMULATED, "emulation.backward_s=[]"], ["emulation.backward_s", "[]"]),
    (
        [*EMULATED, "emulation.send_bytes=1.5"],
        ["emulation.send_bytes", "1.5", "a whole number of at least 1", "or a list with one for each stage"],
    ),
    ([*EMULATED, "emulation.sync_bytes=[2,many]"], ["emulation.sync_bytes", "'many'"]),
    ([*EMULATED, "emulation.send_s=1", "emulation.send_bytes=8"], ["found send_s and send_bytes", "one of them"]),
    ([*EMULATED, "emulation.sync_s=[-1]"], ["emulation.sync_s", "[-1]", "at least 0"]),
    ([*EMULATED, "emulation.foward_s=1"], ["emulation.foward_s", "did you mean forward_s"]),
    (
        [*EMULATED, "emulation.forward_s=[1,2,3]"],
        ["forward_s has 3 values, and the plan 2 stages", "a number, or one for each stage"],
    ),
    (["model.weights=none.safetensors"], ["model.weights", "none.safetensors", "no such file"]),
    (["model.weights=small.yaml"], ["model.weights", "not a readable safetensors file"]),
    (["model.arguments.width=3"], ["model.arguments", "belongs to factory", "leave it out"]),
    (["model.architecture=null", "model.factory=a:b"], ["model.config", "belongs to architecture", "leave it out"]),
    (["training.seed=${nothing}"], ["command line: training.seed", "nothing"]),
    (["training.seed=${training.seed}"], ["training.seed", "Recursive"]),
    (["training.betas[0]=1"], ["training.betas", "a list of numbers"]),
    (["training.betas=[0.9,1]"], ["training.betas", "[0.9, 1.0]", "below 1"]),
    (["training.learning_rate=inf"], ["training.learning_rate", "inf"]),
    (["training.seed=9223372036854775808"], ["training.seed", "below 9223372036854775808"]),
    (["training.global_batch=9999999998"], ["training.global_batch", "below 100000"]),
    (["training.optimizer=auto"], ["training.optimizer", "'auto'", "adamw, sgd"]),
    (["search.schedule=[auto]"], ["search.schedule", "['auto']"]),
    (["cluster.devices_per_node=100000000000"], ["cluster.devices_per_node", "below 1000"]),
    (["data.inputs=[]"], ["data.inputs", "keys and values"]),
    (["data.files=[.]"], ["data.files", "'.'", "not a file"]),
    (["data.files=[short.txt]"], ["data.files", "found 5 bytes", "needs 33"]),
    (["plan.schedule=pipedream"], ["plan: clip_norm: found 1; schedule pipedream needs 0"]),
    (
        ["plan.schedule=pipedream", "training.clip_norm=0"],
        ["plan: stages: 0 and 1 share the parameter transformer.wte.weight", "a synchronous schedule"],
    ),
    (["plan.schedule=gems", "plan.pp=1"], ["plan: schedule gems: 1 device"]),
    (["plan.recompute=some"], ["plan.recompute", "'some'", "one of none, full, auto, or a number from 0 to 1"]),
    (["plan.recompute=1.5"], ["plan.recompute", "1.5", "from 0 to 1"]),
    (["plan.recompute=nan"], ["plan.recompute", "nan"]),
    (["plan.recompute=[full]"], ["plan.recompute", "['full']"]),
    (["plan.recompute=auto"], ["plan.recompute: found auto, which needs cluster.memory_gib"]),
    (["plan.recompute=full", "plan.schedule=zb-h1"], ["plan: recompute: full; schedule zb-h1 does not recompute"]),
    (["plan.schedule_options={chunks: 4}"], ["plan: schedule 1f1b: option 'chunks'", "recompute, sync"]),
    (["plan.schedule_options={sync: [eager]}"], ["plan.schedule_options", "with a whole number or text"]),
    (
        ["plan.schedule=synthesized", "plan.schedule_options={order: F0@0}"],
        ["plan: schedule_options.order", "{file: FILE}"],
    ),
    (["plan.schedule=synthesized", "plan.schedule_options={file: no.json}"], ["plan: no.json: cannot be read"]),
    (["plan.schedule_options={recompute: full}"], ["plan: schedule_options: recompute is 'full'"]),
    (["plan.schedule_options=eager"], ["plan.schedule_options", "'eager'"]),
    (["search.recompute=[0.5,most]"], ["search.recompute", "most", "auto or a list of none, full, auto, or a number"]),
    (["search.recompute=[2]"], ["search.recompute", "[2]"]),
    (["search.subgraphs=0"], ["search.subgraphs", "found 0", "at least 1"]),
    (["search.rannc_blocks=0"], ["search.rannc_blocks", "found 0", "at least 1"]),
    (["search.rannc_smallest_micro_batch=all"], ["search.rannc_smallest_micro_batch", "'all'", "at least 1"]),
    (["search.amp_mesh=[0,4]"], ["search.amp_mesh", "[0, 4]", "at least 1"]),
    (["search.amp_cooling=slow"], ["search.amp_cooling", "'slow'", "one of linear, or a number from 0 to 1"]),
    (["search.amp_cooling=1.5"], ["search.amp_cooling", "1.5", "a number from 0 to 1"]),
    (["search.sync=[soon]"], ["search.sync", "soon", "auto or a list of lazy, eager, eager-opt"]),
    (["search.shard_optimizer=[1]"], ["search.shard_optimizer", "[1]", "auto or a list of false, true"]),
    (["search.shard_optimizer=true"], ["search.shard_optimizer", "True", "auto or a list of false, true"]),
    (["cluster.memory_gib=0"], ["cluster.memory_gib", "found 0", "a number of at least 0.001"]),
    (["cluster.memory_gib=0.001"], ["plan: infeasible: pipeline device", "GiB at B1@0: ", "a device has 0.001 GiB"]),
    (["training"], ["command line", "group.key=value"]),
    (["training=4"], ["training", "found 4", "the keys of this group"]),
    (["cluster.device=cuda"], ["cluster.device", "'cuda'", "this machine has 0"]),
]


@pytest.mark.parametrize(("overrides", "words"), BAD, ids=[" ".join(overrides) for overrides, _ in BAD])
def test_bad_recipes_are_refused_in_one_line(folder, auto3d, overrides, words):
    (folder / "short.txt").write_text("hello")
    message = auto3d("train", "small.yaml", *overrides, code=2).err
    assert message.startswith("auto3d: ")
    assert message.count("\n") == 1
    for word in words:
        assert word in message


FACTORIES = """
notcallable = 5
def number(): return 5
def index(): return [][3]
def ends(): raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.factory=nowhere:make"], ["model.factory", "nowhere", "cannot be imported: ModuleNotFoundError"]),
        (["model.factory=os"], ["model.factory", "package.module:function"]),
        (["model.factory=factories:absent"], ["cannot be imported: AttributeError"]),
        (["model.factory=factories:notcallable"], ["of type int", "it takes a function"]),
        (["model.factory=factories:number"], ["returned an object of type int"]),
        (["model.factory=factories:index"], ["index out of range", "factories.py, line 3"]),
        (["model.factory=factories:ends"], ["ended the program: SystemExit: 3", "factories.py, line 4"]),
        (["model.factory=zero:make"], ["cannot be imported: ZeroDivisionError", "zero.py, line 1"]),
        (["model.factory=syntax:make"], ["cannot be imported: SyntaxError", "syntax.py, line 1"]),
        (["model.factory=exits:make"], ["cannot be imported: SystemExit: 4", "exits.py, line 1"]),
        (["model.arguments.widht=3"], ["model.arguments", "refused by mine:make", "widht"]),
        (["model.config.n_layer=3"], ["model.config", "belongs to architecture"]),
        (["model.weights=other.safetensors"], ["model.weights", "lacks the parameter a.weight", "net.a.weight"]),
        (["model.weights=wide.safetensors"], ["model.weights", "a.weight has shape [32, 8], the model's has [16, 8]"]),
    ],
    ids=lambda value: value[0] if "=" in value[0] else "",
)
def test_errors_of_a_users_own_model_are_told_in_one_line(folder, auto3d, overrides, words):
    modules = {"factories": FACTORIES.lstrip(), "zero": "1/0", "syntax": "def make(:", "exits": "raise SystemExit(4)"}
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    names = {"a.weight": (32, 8), "a.bias": (32,), "b.weight": (3, 32), "b.bias": (3,)}
    tensors = {name: torch.zeros(shape) for name, shape in names.items()}
    save_file(tensors, folder / "wide.safetensors")
    save_file({f"net.{name}": tensor for name, tensor in tensors.items()}, folder / "other.safetensors")
    message = auto3d("train", "own.yaml", *overrides, code=2).err.removeprefix("a line of the user's own\n")
    assert message.count("\n") == 1
    for word in words:
        assert word in message


def test_modules_may_lie_beside_the_recipe(folder, auto3d, monkeypatch):
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "beside.py").write_text(MINE)
    (folder / "elsewhere" / "own.yaml").write_text((folder / "own.yaml").read_text().replace("mine:", "beside:"))
    assert "2 simulated" in auto3d("plan", "elsewhere/own.yaml").out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("null: 2", ["bad.yaml", "not readable"]),
        ("5", ["bad.yaml", "holds no keys"]),
        ("training: {seed: \x01}", ["bad.yaml", "not YAML"]),
        ("model: {config: {a: !!set {b}}}", ["bad.yaml", "not readable"]),
        ("model: {architecture: a, config: " + "{a: " * 400 + "1" + "}" * 400 + "}", ["bad.yaml", "recursion"]),
        ("training: {global_batch: 8", ["bad.yaml", "line 2", "not YAML"]),
        ("- a\n- b", ["bad.yaml", "holds a list"]),
        ("training: {seed: x}", ["bad.yaml: training.seed", "'x'", "whole number"]),
        ("model: {architecture: GPT2LMHeadModel}\ndata:", ["bad.yaml: data", "None"]),
        ("data: {source: text}", ["bad.yaml: model", "none of them"]),
        ("model: tiny-model", ["bad.yaml: model", "'tiny-model'", "gpt2-tiny"]),
        ("model: own.yaml", ["own.yaml: model.architectur", "did you mean architecture"]),
    ],
)
def test_the_message_names_the_file(folder, auto3d, text, words):
    (folder / "bad.yaml").write_text(text)
    (folder / "own.yaml").write_text("architectur: GPT2LMHeadModel")
    message = auto3d("plan", "bad.yaml", code=2).err
    assert message.count("\n") == 1
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "tinny"], ["recipe: there is no 'tinny'", "did you mean tiny"]),
        (["plan", "none/none.yaml"], ["recipe: there is no 'none/none.yaml'"]),
        (["table", "small.yaml"], ["no finished trial", "auto3d sweep"]),
        (["train", "small.yaml", "--plan", "none.json"], ["none.json", "does not exist"]),
        (["train", "small.yaml", "--plan", "small.yaml"], ["small.yaml", "Invalid JSON"]),
        (["trian", "small.yaml"], ["trian"]),
        (["train"], ["RECIPE"]),
    ],
)
def test_bad_commands(folder, auto3d, arguments, words):
    message = auto3d(*arguments, code=2).err
    for word in words:
        assert word in message


def test_no_plan_in_recipe_and_no_plan_file(folder, auto3d):
    (folder / "planless.yaml").write_text(GPT2[: GPT2.index("plan:")])
    assert "--plan FILE" in auto3d("train", "planless.yaml", code=2).err


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
    assert load("small.yaml", ["plan.dp=${plan.pp}"]).values.plan.dp == 2, "of the file, from the command line"
    with pytest.raises(RecipeError, match=r"training\.seed: .*'many'"):
        load("small.yaml", ["training.optimizer=many", "training.seed=${training.optimizer}"])


def test_saved_recipe_loads_to_the_same(folder):
    for name in ("tiny", "small.yaml"):
        loaded = load(name, ["data.inputs.input_ids.kind=tokens"])
        (folder / "saved.yaml").write_text(loaded.text, encoding="utf-8")
        assert load("saved.yaml").values == loaded.values


def test_every_key_is_documented():
    known = {name for name, *_ in documented_keys()}
    for group in groups():
        for item in fields(group_schema(group)):
            assert any(re.match(rf"{group}\.{item.name}\b", name) for name in known), item.name
    assert all(meaning and takes for _, _, takes, meaning in documented_keys())


@pytest.mark.parametrize(
    "file", [one for one in sorted(RECIPES.rglob("*.yaml")) if "papers" not in one.parts], ids=lambda file: file.stem
)
def test_every_key_of_a_shipped_recipe_is_commented(file: Path):
    """The test covers keys of the schema, not keys of a model's configuration."""
    names = {name.split(".")[1] for name, *_ in documented_keys()} | {item.name for item in fields(AcceleratorRecipe)}
    for line in file.read_text().splitlines():
        key, separator, rest = line.strip().partition(":")
        if separator and key in names and key != "config" and file.parent.name != "models":
            assert "#" in rest, line


@pytest.mark.parametrize(
    "file",
    [file for pattern in ("*.yaml", "public/*.yaml", "published/*.yaml") for file in sorted(RECIPES.glob(pattern))],
    ids=lambda file: file.stem,
)
def test_shipped_recipes_load(file: Path):
    load(str(file))


def test_errors_found_later_name_the_file_too():
    assert str(load("tiny").error("data.sequence_length", "x")).endswith("tiny.yaml: data.sequence_length: x")
    assert "gpt2-tiny.yaml" in str(load("tiny").error("model.config", "x"))
    assert isinstance(load("tiny").error("model", "x"), RecipeError)
