"""A sweep of peers as a user runs it: one table, one road, and a row for what a peer cannot train."""

import json
from pathlib import Path

import pytest

from auto3d.runtime.measurement import Measurement

AXES = ("search.dp=[1,2]", "search.pp=[1,2]", "search.micro_batch_size=[4]", "search.allow_idle_devices=false")
SWEEP = ("own.yaml", "cluster.devices_per_node=2", *AXES, "search.engine=[auto3d,ddp]", "measure.iterations=3")


def measurements(folder: Path) -> dict[str, Measurement]:
    """Trial -> its measurement."""
    found = (folder / "runs" / "own" / "trials").glob("*/measurement.json")
    return {file.parent.name: Measurement.from_json(file.read_bytes()) for file in found}


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


def test_nothing_predicts_a_peer(folder, auto3d):
    refused = auto3d("plan", "own.yaml", "search.engine=[ddp]", code=2)
    assert "ddp is measured by `auto3d sweep`; only auto3d has a cost model" in refused.err


def test_an_unknown_engine_is_refused(folder, auto3d):
    refused = auto3d("sweep", "own.yaml", "search.engine=[megatron]", code=2)
    assert "search.engine: found 'megatron'" in refused.err or "search.engine: found ['megatron']" in refused.err
    assert "deepspeed-zero:stage=3" in refused.err
