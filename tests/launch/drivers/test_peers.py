"""A sweep of peers as a user runs it: one table, one road, and a row for what a peer cannot train."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from auto3d.runtime.measurement import Measurement, Status
from launch.executors import trial
from launch.recipe.load import load
from tests.distributed.parity import make_plan

AXES = ("search.dp=[1,2]", "search.pp=[1,2]", "search.micro_batch_size=[4]", "search.allow_idle_devices=false")
SWEEP = ("own.yaml", "cluster.devices_per_node=2", *AXES, "search.engine=[auto3d,ddp]", "measure.iterations=3")


def measurements(folder: Path) -> dict[str, Measurement]:
    """Trial -> its measurement."""
    found = (folder / "runs" / "own" / "trials").glob("*/measurement.json")
    return {file.parent.name: Measurement.from_json(file.read_bytes()) for file in found}


@pytest.mark.soak
def test_a_sweep_measures_peers_beside_auto3d(folder, auto3d):
    printed = auto3d("sweep", *SWEEP)
    assert "infeasible: ddp has no pipeline; the plan has pp = 2" in printed.out
    rows = json.loads(auto3d("table", *SWEEP, "--json").out)
    assert sorted((row["engine"], row["dp"], row["pp"], row["status"]) for row in rows) == [
        ("auto3d", 1, 2, "ok"),
        ("auto3d", 2, 1, "ok"),
        ("ddp", 1, 2, "infeasible"),
        ("ddp", 2, 1, "ok"),
    ]
    assert [row["why_not"] for row in rows if row["why_not"]] == ["ddp has no pipeline; the plan has pp = 2"]
    table = (folder / "tables" / "own" / "table.md").read_text()
    assert "why not" in table
    assert "| ddp " in table

    ended = measurements(folder)
    losses = [one.loss for one in ended.values() if one.loss]
    assert len(losses) == 3
    for loss in losses:
        assert loss == pytest.approx(losses[0], rel=1e-5)
    assert json.loads((folder / "tables" / "own" / "best_plan.json").read_text())["engine"] == "auto3d"

    again = auto3d("sweep", *SWEEP)
    assert "0.000 s" not in again.out
    assert {name: one.finished for name, one in measurements(folder).items() if one.loss} == {
        name: one.finished for name, one in ended.items() if one.loss
    }, "nothing runs twice"

    (plan,) = (folder / "runs" / "own" / "trials").glob("ddp-dp2*/plan.json")
    refused = auto3d("train", "own.yaml", "cluster.devices_per_node=2", "--plan", str(plan), code=2)
    assert "engine: ddp runs in trials of `auto3d sweep` only" in refused.err


DATA_PARALLEL = ("own.yaml", "cluster.devices_per_node=2", "search.dp=[2]", "search.pp=[1]", *AXES[2:])


@pytest.mark.soak
def test_a_second_run_of_deepspeed_gives_the_columns_of_communication(folder, auto3d):
    pytest.importorskip("deepspeed")
    engines = "search.engine=[auto3d,deepspeed-zero]"
    asked = (*DATA_PARALLEL, engines, "measure.iterations=2", "measure.communication=true")
    printed = auto3d("sweep", *asked)
    assert "not logged: auto3d has no communication log" in printed.out
    rows = {row["engine"]: row for row in json.loads(auto3d("table", *asked, "--json").out)}
    ours, peer = rows["auto3d"], rows["deepspeed-zero"]
    assert (ours["communicated_bytes"], ours["communication_s"]) == (None, None)
    assert peer["why_not_logged"] is None
    assert peer["communication_s"] > 0
    (measured,) = (one for one in measurements(folder).values() if one.plan.engine == "deepspeed-zero")
    assert len(measured.iteration_s) == 2
    first, second = measured.communication
    assert [calls.operation for calls in first] == [calls.operation for calls in second]
    assert peer["communicated_bytes"] == sum(calls.message_bytes for calls in first)
    table = (folder / "tables" / "own" / "table.md").read_text()
    assert "communicated (MiB)" in table
    assert "whose calls block" in table


@pytest.mark.soak
def test_a_second_run_of_deepspeed_logs_its_communication(folder):
    pytest.importorskip("deepspeed")
    plan = replace(make_plan("gpt2", dp=2, pp=1), engine="deepspeed-zero")
    keys = ["measure.communication=true", "measure.iterations=2", "measure.warmup_iterations=0"]
    found = trial.measure(load("own.yaml", ["search.engine=[deepspeed-zero]", *keys]), plan, folder)
    assert (found.status, found.why_not_logged) == (Status.OK, ""), found.error
    assert len(found.iteration_s) == 2
    first, second = found.communication
    assert [calls.operation for calls in first] == [calls.operation for calls in second] != []


def test_a_failure_of_the_run_that_logs_leaves_the_timed_one(folder, monkeypatch):
    pytest.importorskip("deepspeed")
    plan = replace(make_plan("gpt2", dp=2, pp=1), engine="deepspeed-zero")
    recipe = load("own.yaml", ["search.engine=[deepspeed-zero]", "measure.communication=true"])

    def failed(*arguments, **named):
        raise RuntimeError("the log is broken")

    monkeypatch.setattr(trial, "log_communication", failed)
    found = trial.measure(recipe, plan, folder)
    assert found.status is Status.OK, found.error
    assert found.communication == []
    assert "ended with failed" in found.why_not_logged
    assert "the log is broken" in found.why_not_logged


def test_nothing_predicts_a_peer(folder, auto3d):
    refused = auto3d("plan", "own.yaml", "search.engine=[ddp]", code=2)
    assert "ddp is measured by `auto3d sweep`; only auto3d has a cost model" in refused.err


def test_an_unknown_engine_is_refused(folder, auto3d):
    refused = auto3d("sweep", "own.yaml", "search.engine=[megatron]", code=2)
    assert "search.engine: found 'megatron'" in refused.err or "search.engine: found ['megatron']" in refused.err
    assert "deepspeed-zero:stage=3" in refused.err
