"""`auto3d profile`, and predictions from the profile that it writes."""

import json
import shlex
import stat

import pytest

from auto3d.runtime.profile import link_timing, profiler, subgraph_timing

HERE = ["cluster.devices_per_node=2", "search.micro_batch_size=[4]"]

LAYERS = """
model: {factory: "linear:build"}
data: {source: synthetic, inputs: {x: {kind: normal, shape: [8]}}}
cluster: {device: cpu, devices_per_node: 2}
training: {global_batch: 8}
search: {tp: [1], micro_batch_size: [2]}
"""
SOURCE = """
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    def forward(self, x):
        return self.layers(x).sum()
def build():
    return Model()
"""


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(profiler, "ROUNDS", 1)
    monkeypatch.setattr(profiler, "STAGE_ROUNDS", 1)
    monkeypatch.setattr(profiler, "LOAD_S", 0.0)
    monkeypatch.setattr(subgraph_timing, "ROUND_S", 0.0)
    monkeypatch.setattr(link_timing, "ALL_REDUCE_SIZES", (16, 4096))


def test_rannc_takes_the_times_of_stages_that_were_run(auto3d, folder, short):
    (folder / "layers.yaml").write_text(LAYERS)
    (folder / "linear.py").write_text(SOURCE)
    rannc = ["partition", "layers.yaml", "--method", "rannc"]
    before = auto3d(*rannc).out
    assert "candidate stages: 0 measured, 10 added up from the times of their operations; auto3d profile" in before
    found = json.loads(auto3d("profile", "layers.yaml", "--stages", "--json").out)["candidates"]
    assert [each["micro_batch_size"] for each in found] == [1, 2]
    # Three layers and the sum: 4 runs have the first layer, 3 others the sum, and the rest are 1 or 2 equal layers.
    assert [(len(each["kinds"]), len(each["forward_s"])) for each in found] == [(10, 9), (10, 9)]
    measured = json.loads(auto3d(*rannc, "--json").out)
    assert (measured["candidates"], measured["measured_candidates"]) == (10, 10)
    assert "candidate stages: 10 measured, 0 added up from the times of their operations\n" in auto3d(*rannc).out
    without = json.loads(auto3d(*rannc, "--json", "prediction.profile=none").out)
    assert (without["candidates"], without["measured_candidates"]) == (10, 0)
    uniform = json.loads(auto3d("partition", "layers.yaml", "--stages", "2", "--json").out)
    assert (uniform["candidates"], uniform["measured_candidates"]) == (0, 0)


@pytest.mark.soak
def test_profile_then_predict(auto3d, folder, short):
    (folder / "candidates.csv").write_text("micro_batch_size,tp,dp,pp\n4,1,2,1\n4,1,1,1\n")
    predict = ["predict", "own.yaml", *HERE, "--candidates", "candidates.csv", "--json"]
    estimated = json.loads(auto3d(*predict).out)

    record = json.loads(auto3d("profile", "own.yaml", *HERE, "--json").out)
    file = folder / record["file"]
    assert file == folder / "profiles/own.json"
    assert {size["micro_batch_size"] for size in record["sizes"]} == {1, 2, 4}
    assert json.loads(file.read_text()).items() <= record.items()
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert file.with_suffix(".svg").read_text().startswith("<?xml")

    measured = json.loads(auto3d(*predict).out)
    assert all(one["predicted_s"] != other["predicted_s"] for one, other in zip(measured, estimated, strict=True))
    without = json.loads(auto3d(*predict, "prediction.profile=none").out)
    assert without == estimated

    for change, words in {
        "training.threads_per_rank=2": "it was measured with threads 1, but 2 is needed",
        "cluster.devices_per_node=4": "it was measured with devices per node 2, but 4 is needed",
        "model.arguments.width=8": "it was measured on mine:make of own (graph ",
    }.items():
        others = [argument for argument in predict[:-1] if not argument.startswith(f"{change.split('=')[0]}=")]
        told = auto3d(*others, change, code=2).err.splitlines()[-1]  # the model's own code prints, too
        assert f"profiles/own.json: {words}" in told
        assert "profile own.yaml" in told
    file.write_text(file.read_text()[:-1])
    assert "profiles/own.json: profile: Invalid JSON" in auto3d(*predict, code=2).err


@pytest.mark.soak
def test_tune_measures_this_machine_once_and_plan_says_what_it_rests_on(auto3d, folder, short):
    guess = "on round figures of a data-centre GPU), not measured; nothing was measured on this device"
    tune = ["tune", "own.yaml", *HERE, "search.trials=1", "measure.iterations=2"]
    command = shlex.join(["auto3d", "profile", "own.yaml", *HERE])
    assert f"{guess}, so they may be far off; to measure it: {command}" in auto3d("plan", "own.yaml", *HERE).out
    skipped = auto3d(*tune, "--no-profile")
    assert "measuring" not in skipped.err
    assert guess in skipped.out
    assert not (folder / "profiles").exists()
    first = auto3d(*tune)
    assert "measuring this machine for the predictions, once, about 30 s: profiles/own-own.json" in first.err
    assert "on what profiles/own-own.json measured" in first.out
    assert "measuring" not in auto3d(*tune).err, "the profile is kept"
    shown = auto3d("plan", "own.yaml", *HERE).out
    assert "on what profiles/own-own.json measured), not measured" in shown
    assert "auto3d profile" not in shown
    assert guess in auto3d("plan", "own.yaml", *HERE, "model.arguments.width=8").out, "of another model: not refused"

    auto3d("profile", "own.yaml", *HERE)
    assert "on what profiles/own.json measured" in auto3d("plan", "own.yaml", *HERE).out
    assert not (folder / "profiles/own-own.json").exists()


def test_a_profile_of_a_node_says_how_it_was_made_and_serves_a_cluster_of_them(auto3d, folder, short):
    """A search for several nodes captures the model at two sizes; the profile fits it at a third."""
    printed = auto3d("profile", "own.yaml", *HERE).out
    assert "Measured: mine:make of own, 2 ranks of 1 thread" in printed
    assert "written: profiles/own.json, profiles/own.svg" in printed
    search = ["plan", "own.yaml", *HERE, "cluster.nodes=2", "--json"]
    measured, estimated = (
        json.loads(auto3d(*search, *more).out)["candidates"] for more in ([], ["prediction.profile=none"])
    )
    assert len(measured) == len(estimated) == 1
    assert measured != estimated
    assert "it was measured on mine:make of own (graph " in auto3d(*search, "model.arguments.width=8", code=2).err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.compute=emulated", "training.compute: found 'emulated'; only real devices are measured"),
        ("cluster.more=[{nodes: 1}]", "cluster.more: found further kinds of nodes"),
        ("prediction.profile=gone.json", "prediction.profile: found 'gone.json'; there is no such file"),
    ],
)
def test_refusals(auto3d, folder, override, words):
    (folder / "candidates.csv").write_text("micro_batch_size,tp,dp,pp\n4,1,2,1\n")
    command = (
        ["predict", "own.yaml", "--candidates", "candidates.csv"] if "gone" in override else ["profile", "own.yaml"]
    )
    assert words in auto3d(*command, override, code=2).err
