"""`auto3d capture` and `auto3d partition`: figures, the cache, pictures, and errors for bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from auto3d.partition.methods import STAGE_METHODS
from auto3d.plan import Plan

ROOT = Path(__file__).parents[3]
MINE = """
model: {factory: "mine:build", arguments: {depth: 4}}
data: {source: synthetic, inputs: {x: {kind: normal, shape: [8]}}}
training: {global_batch: 8}
"""
SOURCE = """
from torch import nn
class Model(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))
    def forward(self, x):
        return self.layers(x).sum()
def build(depth):
    return Model(depth)
"""


@pytest.fixture
def auto3d(auto3d):
    """Runs a command and returns its standard output or, for an exit code other than 0, its standard error."""

    def run(*arguments: str, code: int = 0) -> str:
        printed = auto3d(*arguments, code=code)
        return printed.err if code else printed.out

    return run


def in_process(folder: Path, *arguments: str, modules: bool = False) -> str:
    """The last line that the command prints in another process or, with ``modules``, the modules that it imported."""
    code = "import sys; from launch.main import main; sys.argv[0] = 'auto3d'\ntry: main()\nexcept SystemExit: pass\n"
    if modules:
        code += "print('\\n' + ' '.join(sys.modules))"
    environment = os.environ | {"AUTO3D_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=200)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()[-1]


def test_capture_tells_size_flops_and_subgraphs(auto3d):
    record = json.loads(auto3d("capture", "tiny", "--json"))
    assert record["parameters"] == 1_635_584
    assert record["subgraphs"] == 19
    assert record["first_user"] == {"input_ids": 0, "labels": 18}
    again = json.loads(auto3d("capture", "tiny", "--json"))
    assert again["cached"]
    assert {**record, "seconds": 0, "peak_bytes": 0, "cached": True} == {**again, "seconds": 0, "peak_bytes": 0}
    assert not json.loads(auto3d("capture", "tiny", "--json", "--fresh"))["cached"]
    twice = json.loads(auto3d("capture", "tiny", "--json", "--micro-batch-size", "8", "--subgraphs", "5"))
    assert (twice["flops"], twice["subgraphs"]) == (2 * record["flops"], 5)
    assert "1,635,584" in auto3d("capture", "tiny")


def test_capture_lists_what_tensor_parallel_ranks_split_and_exchange(auto3d):
    found = json.loads(auto3d("capture", "tiny", "--tp", "4", "--json"))["tensor"]
    weights = {each["weight"]: each for each in found["weights"]}
    assert weights["transformer.h.0.attn.c_attn.weight"]["split"] == {"dim": 1, "blocks": [128, 128, 128]}
    assert weights["transformer.wpe.weight"] == {
        "weight": "transformer.wpe.weight",
        "shape": [128, 128],
        "split": {"dim": 0, "blocks": [128]},
        "reason": "",
    }
    assert found["split_flops"] == 1
    counts = {(each["phase"], each["collective"]): each["count"] for each in found["exchanges"]}
    layers, vocabulary, loss = 8, 1, 2
    assert counts["forward", "all-reduce"] == 2 * layers + vocabulary + loss, "as Megatron-LM"
    assert counts["backward", "all-reduce"] == 2 * layers + vocabulary
    assert "forward: reduce-scatter" in auto3d("capture", "tiny", "--tp", "4", "--sequence-parallel")
    text = auto3d("capture", "tiny", "--tp", "4", "model.tensor_parallel={'*.mlp.*': whole}")
    assert "transformer.h.*.attn.c_attn.weight (8)  128 × 384  dimension 1 split in 3 blocks" in text
    assert "transformer.h.*.mlp.c_fc.weight (8)     128 × 512  whole" in text
    assert "a rule says so" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sequence-parallel"], "--sequence-parallel needs --tp of 2 or more"),
        (
            ["--tp", "3", "model.tensor_parallel={'*.c_attn': heads}"],
            "h.0.attn.c_attn has 4 heads, which do not divide",
        ),
        (["--tp", "2", "model.tensor_parallel={h.*: row}"], "model.tensor_parallel: 'h.*' matches no module"),
    ],
)
def test_capture_refuses_rules_that_are_not_possible(auto3d, options, words):
    assert words in auto3d("capture", "tiny", *options, code=2)


def test_a_cached_model_needs_neither_torch_nor_the_models_code(tmp_path):
    (tmp_path / "mine.yaml").write_text(MINE)
    source = tmp_path / "mine.py"
    source.write_text(SOURCE)
    os.utime(source, (0, 0))
    command = ["partition", "mine.yaml", "--stages", "2", "--json"]
    first = json.loads(in_process(tmp_path, *command))
    assert json.loads(in_process(tmp_path, *command)) == first
    imported = in_process(tmp_path, *command, modules=True).split()
    assert not {"torch", "transformers", "mine"} & set(imported)

    source.write_text(SOURCE.replace("self.layers(x)", "self.layers(x).relu()"))
    os.utime(source, (0, 0))  # its time of change is the same, its content is not
    assert json.loads(in_process(tmp_path, *command))["graph"] != first["graph"]


@pytest.mark.parametrize("method", STAGE_METHODS)
def test_stages_hold_the_whole_model(auto3d, method):
    whole = json.loads(auto3d("capture", "tiny", "--json"))
    record = json.loads(auto3d("partition", "tiny", "--method", method, "--stages", "4", "--json"))
    stages = record["stages"]
    assert len(stages) == 4
    assert sum(stage["flops"] for stage in stages) == whole["flops"]
    assert sum(stage["flops_share"] for stage in stages) == pytest.approx(1)
    tied = 256 * 128  # the first and the last stage both hold it
    assert sum(stage["parameters"] for stage in stages) == whole["parameters"] + tied
    assert [stage["send_bytes"] for stage in stages] == [4 * 128 * 128 * 4] * 3 + [0]
    assert all(stage["replicas"] >= 1 for stage in stages)
    shares = [stage["flops"] / stage["replicas"] for stage in stages]
    assert record["balance"] == pytest.approx(max(shares) / (sum(shares) / 4))
    layers = [name for stage in stages for name in stage["modules"] if ".h." in name]
    assert layers == [f"transformer.h.{layer}" for layer in range(8)]
    assert [stage["inputs"] for stage in stages] == [["input_ids"], [], [], ["labels"]]


def test_rannc_chooses_stages_and_replicas(auto3d):
    """tiny's four devices first have enough memory, then so little that the model must be divided."""
    whole = json.loads(auto3d("capture", "tiny", "--json"))
    for memory in ([], ["--memory-gib", "0.03"]):
        record = json.loads(auto3d("partition", "tiny", "--method", "rannc", "--json", *memory))
        stages = record["stages"]
        assert sum(stage["flops"] for stage in stages) == whole["flops"]
        assert sum(stage["replicas"] for stage in stages) <= 4
        assert record["micro_batches"] >= 1
        assert (len(stages) > 1) == bool(memory)


def test_replicas_with_unequal_slices_are_named(auto3d):
    """On three devices RaNNC replicates tiny's only stage three times; 16 samples have no three equal slices."""
    three = ["partition", "tiny", "cluster.devices_per_node=3", "--method", "rannc", "--memory-gib", "1"]
    assert "the 3 replicas of stage 0 would get unequal slices of" in auto3d(*three)
    assert "unequal" not in auto3d("partition", "tiny", "--method", "rannc")


@pytest.mark.soak
def test_a_partition_can_be_trained(auto3d, tmp_path):
    """RaNNC gives stages different numbers of replicas; the other methods give each stage one."""
    file = tmp_path / "plan.json"
    small = ["training.iterations=1", "model.config.n_layer=4"]
    printed = auto3d("partition", "tiny", *small, "--method", "rannc", "--memory-gib", "0.012", "--plan", str(file))
    plan = Plan.from_json(file.read_text())
    assert plan.ranks == 4
    assert f"auto3d train tiny {' '.join(small)} --plan {file}" in printed
    record = json.loads(auto3d("train", "tiny", *small, "--plan", str(file), "--json"))
    assert record["plan"] == json.loads(plan.to_json())
    assert len(record["peak_bytes"]) == 4

    auto3d("partition", "tiny", "--stages", "2", "--micro-batch-size", "4", "--plan", str(file))
    plan = Plan.from_json(file.read_text())
    assert (plan.dp, plan.pp, plan.ranks, plan.micro_batches, plan.schedule) == (1, 2, 2, 4, "1f1b")
    message = auto3d("partition", "tiny", "--stages", "2", "--micro-batch-size", "3", "--plan", str(file), code=2)
    assert "global_batch: 16 does not divide" in message


def test_a_module_that_is_cut_is_named_by_its_parts(auto3d):
    stages = json.loads(auto3d("partition", "tiny", "--stages", "3", "--json"))["stages"]
    names = [name for stage in stages for name in stage["modules"]]
    assert len(set(names)) == len(names)
    cut = [name for name in names if name.startswith("transformer.h.2.")]
    assert {"transformer.h.2.ln_1", "transformer.h.2.attn", "transformer.h.2.mlp"} <= set(cut)


def test_picture_and_table(auto3d, tmp_path):
    file = tmp_path / "stages.svg"
    text = auto3d("partition", "tiny", "--stages", "4", "--svg", str(file))
    assert str(file) in text
    assert "balance" in text
    picture = ElementTree.parse(file).getroot()
    titles = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 17  # the embeddings and the last norm cost nothing
    assert "subgraph 1:" in titles[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", "40"], ["40 stages, but only", "cost anything"]),
        (["--stages", "4", "--method", "autopip"], ["'autopip'", "uniform", "did you mean autopipe?"]),
        (["--stages", "4", "--subgraphs", "400"], ["400 subgraphs", "at most 19"]),
        (["--stages", "0"], ["--stages", "0"]),
        ([], ["stages: none given", "autopipe takes a number"]),
        (["--method", "rannc", "--stages", "2"], ["stages: 2 is given", "rannc finds"]),
        (["--stages", "4", "--memory-gib", "0.001"], ["4 stages do not fit"]),
        (["--stages", "4", "--svg", "no/such/folder.svg"], ["no/such/folder.svg", "cannot be written"]),
        (["--stages", "4", "--plan", "no/such/plan.json"], ["no/such/plan.json", "cannot be written"]),
        (["--stages", "4", "model.config.n_layer=0.5"], ["n_layer"]),
    ],
)
def test_bad_input_is_told_in_one_line(auto3d, arguments, words):
    message = auto3d("partition", "tiny", *arguments, code=2)
    assert message.count("\n") == 1
    for word in words:
        assert word in message
