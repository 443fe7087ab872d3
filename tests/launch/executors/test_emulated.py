"""Every record, table and line says whether its figures are emulated or measured."""

import csv
import json
import re

import pytest

from auto3d.runtime.measurement import Measurement, Status
from launch.recipe.load import load
from launch.recipe.settings import emulation, training_settings

EMULATED = ["training.compute=emulated", "emulation.forward_s=0.002", "emulation.backward_s=[0.002,0.003]"]


@pytest.fixture
def folder(same_folder):
    return same_folder


def test_training_says_that_it_was_emulated(folder, auto3d):
    """This also holds for a recipe of a cluster of GPUs on a machine without any."""
    arguments = ["train", "own.yaml", *EMULATED, "cluster.device=cuda"]
    printed = auto3d(*arguments)
    assert "samples/s (emulated, not measured: nothing was computed)" in printed.out
    assert "loss" not in printed.out + printed.err
    assert re.search(r"iteration 2/2: emulated, \d", printed.err)
    record = json.loads(auto3d(*arguments, "--json").out)
    assert record["emulated"] is True
    assert record["loss"] == record["grad_norm"] == record["peak_bytes"] == [], "nothing was computed"
    assert len(record["iteration_s"]) == 2
    real = json.loads(auto3d("train", "own.yaml", "--json").out)
    assert real["emulated"] is False


@pytest.mark.soak
def test_a_sweep_and_its_tables_say_that_they_were_emulated(folder, auto3d):
    arguments = ["own.yaml", *EMULATED, "search.pp=[1,2]", "search.micro_batch_size=[4]"]
    pruned = auto3d("plan", *arguments, "search.schedule=[1f1b,interleaved-1f1b]").out
    assert "emulation: backward_s has 2 values, and the plan 1 stages" in pruned
    swept = auto3d("sweep", *arguments)
    assert re.search(r"1/1 \S+ ok \d+\.\d+ s/iteration \(emulated\)", swept.err)
    shown = " ".join(auto3d("table", *arguments).out.split())
    markdown = (folder / "tables/own/table.md").read_text()
    for text in (shown, markdown):
        assert "Emulated, not measured on real devices: mine:make" in text
        assert "except forward_s 0.002, backward_s (0.002, 0.003)" in text
        assert "Measured" not in text
        assert "peak memory" not in text
    assert "emulated" in swept.out
    with (folder / "tables/own/table.csv").open() as file:
        records = list(csv.DictReader(file))
    assert [(row["devices"], row["status"], row["peak_bytes"]) for row in records] == [("emulated", "ok", "")]
    assert markdown.splitlines()[2].rstrip(" |").endswith("emulated")
    assert {row["devices"] for row in json.loads(auto3d("table", *arguments, "--json").out)} == {"emulated"}
    for file in (folder / "runs/own/trials").glob("*/measurement.json"):
        kept = Measurement.from_json(file.read_bytes())
        assert kept.emulated
        assert (kept.status, kept.loss, kept.peak_bytes) == (Status.OK, [], [])
    assert "ok" not in auto3d("sweep", *arguments).err, "every trial has ended, so none runs"


@pytest.mark.parametrize("group", [["emulation={}"], []])
def test_what_a_recipe_leaves_out_is_left_to_the_cost_model(folder, group):
    values = load("own.yaml", ["training.compute=emulated", *group]).values
    assert set(vars(emulation(values)).values()) == {None}
    assert training_settings(load("own.yaml").values, iterations=1).emulation is None
