"""Intervals around predicted times: what they hold, whose errors they come from, and what `auto3d plan` prints."""

import json
import sys
from math import exp, sqrt

import numpy as np
import pytest

from launch.model.certainty import Certainty, Origin, SetErrors, certainty_from, certainty_of, known_errors
from launch.model.ranking import what_separates
from launch.recipe.load import load

RECIPE = """
model: {architecture: GPT2LMHeadModel, config: {n_layer: 4, n_head: 2, n_embd: 32, n_positions: 32, vocab_size: 256}}
data: {source: synthetic, sequence_length: 32}
cluster: {nodes: 1, devices_per_node: 4, device: cuda, accelerator: A100-80GB}
training: {global_batch: 64}
search: {dp: [2], tp: [1], schedule: [gpipe, 1f1b], micro_batch_size: [1, 2]}
prediction: {profile: none, system: deepspeed}
"""


def errors(name, origin, whole, between=0.1):
    return SetErrors(name=name, origin=origin, runs=10, mean_log=0.0, whole=whole, between=between)


def test_an_interval_holds_four_of_five_measurements():
    certainty = Certainty(origin=Origin.FITTED, sets=("a",), whole=0.3, between=0.1)
    low, high = certainty.interval(2.0)
    assert low * high == pytest.approx(4.0)
    measured = 2.0 * np.exp(np.random.default_rng(1).normal(0.0, 0.3, 100_000))
    assert np.mean((measured >= low) & (measured <= high)) == pytest.approx(0.8, abs=0.005)


def test_plans_are_told_apart_if_nine_of_ten_measurements_order_them_so():
    certainty = Certainty(origin=Origin.FITTED, sets=("a",), whole=0.3, between=0.1)
    ratio = 1 + certainty.least_difference
    draws = np.random.default_rng(1).normal(0.0, 0.1, (2, 100_000))
    assert np.mean(np.exp(draws[0]) < ratio * np.exp(draws[1])) == pytest.approx(0.9, abs=0.005)
    assert certainty.tells_apart(1.0, 1.001 * ratio)
    assert not certainty.tells_apart(1.0, 0.999 * ratio)


def test_each_set_counts_the_same():
    found = certainty_from(
        [errors("a", Origin.FITTED, 0.1), errors("b", Origin.FITTED, 0.2, None), errors("c", Origin.DATA_SHEET, 1.0)],
        Origin.FITTED,
    )
    assert (found.sets, found.whole) == (("a", "b"), pytest.approx(sqrt((0.01 + 0.04) / 2)))
    assert found.between == 0.1  # b has no plans to compare
    assert certainty_from([errors("c", Origin.DATA_SHEET, 1.0)], Origin.FITTED) is None


@pytest.mark.parametrize(
    ("overrides", "origin"),
    [
        ([], Origin.FITTED),
        (["prediction.system=auto3d"], Origin.OTHER_SYSTEM),
        (["cluster.accelerator=RTX3090-24GB"], Origin.DATA_SHEET),
        (["cluster.more=[{nodes: 1, devices_per_node: 4, accelerator: T4}]"], Origin.DATA_SHEET),
        (["cluster.accelerator=null"], None),  # round figures, which no published set has
        (["cluster.device=cpu"], None),
    ],
)
def test_the_origin_is_that_of_the_least_known_device(tmp_path, overrides, origin):
    file = tmp_path / "own.yaml"
    file.write_text(RECIPE)
    recipe = load(str(file), overrides)
    found = certainty_of(recipe, "")
    assert (None if found is None else found.origin) is origin
    assert certainty_of(recipe, "profiles/own.json") is None  # measured on the machine itself: not scored on any set


def test_less_is_known_where_figures_have_a_lesser_origin():
    spreads = [certainty_from(known_errors(), origin).whole for origin in Origin]
    assert max(spreads) == spreads[-1]
    assert exp(1.2816 * spreads[0]) < 1.25  # figures fitted to the same system on the same device


def test_plan_prints_intervals_and_the_plans_that_cannot_be_told_apart(tmp_path, auto3d, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(RECIPE)
    record = json.loads(auto3d("plan", "own.yaml", "--json").out)
    certainty = certainty_of(load("own.yaml"), "")
    best, *others = record["candidates"]
    low, high = best["interval_s"]
    assert (low, high) == pytest.approx(certainty.interval(best["predicted_s"]))
    assert record["certainty"]["sets"] == list(certainty.sets)
    alike = sum(not certainty.tells_apart(best["predicted_s"], one["predicted_s"]) for one in others)
    assert 0 < alike < len(others)
    page = auto3d("plan", "own.yaml").out
    assert f" {low:.3g}–{high:.3g} " in page
    plans = "plan 2 is" if alike == 1 else f"plans 2 to {alike + 1} are"
    assert f"{plans} as fast as plan 1, within what is known" in page
    rows = [line for line in page.splitlines() if " ≈" in line]
    assert len(rows) == alike == sum(one["as_fast_as_first"] for one in record["candidates"])
    assert not best["as_fast_as_first"]
    assert f"what tells them apart at the least cost: {record['separated_by']}" in page
    assert "80 %" not in auto3d("plan", "own.yaml", "cluster.device=cpu").out


@pytest.mark.parametrize(
    ("plans", "overrides", "commands"),
    [
        (2, [], "auto3d tune own.yaml search.trials=3"),
        (5, ["prediction.profile=none"], "auto3d tune own.yaml prediction.profile=none search.trials=8"),
        (5, [], "auto3d profile own.yaml (one node), then auto3d tune own.yaml search.trials=5"),
    ],
)
def test_few_plans_are_told_apart_by_trials_and_many_by_a_profile_first(
    tmp_path, monkeypatch, plans, overrides, commands
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(RECIPE.replace("profile: none, ", ""))
    found = what_separates(load("own.yaml", overrides), plans)
    assert found.replace(sys.argv[0], "auto3d") == commands
