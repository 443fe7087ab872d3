"""What predictions assume is said, and plans whose order it decides are marked."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from launch.model.assumed import FACTORS, assumed_line, assumed_lines, assumed_links, assumed_records, places_assumed
from launch.model.costs import cost_model, planning_subject
from launch.model.search import search_recipe
from launch.recipe.load import load

RECIPE = """
model:
  architecture: GPT2LMHeadModel
  config: {n_layer: 4, n_head: 8, n_embd: 1024, n_positions: 128, vocab_size: 4096, bos_token_id: 0, eos_token_id: 0}
data: {source: synthetic, sequence_length: 128, vocabulary_size: 4096}
cluster: {nodes: 2, devices_per_node: 4, device: cuda, accelerator: v100-32gb}
training: {global_batch: 32, check_capture: false}
search: {tp: [1, 2, 4], micro_batch_size: [2, 4], schedule: [1f1b], partition: [blocks], placement: [megatron]}
launch: {executor: local}
"""
LINKS = {"inside": (1200, "latency_us: 10"), "outside": (100, "latency_us: 8, lanes: 1")}  # those of a V100


@pytest.fixture
def plain(folder):
    (folder / "gpus.yaml").write_text(RECIPE)
    return load("gpus.yaml")


def explicit(factor: float, *sides: str) -> list[str]:
    """Overrides that give the usual links of a V100, with ``factor`` times their bandwidth."""
    given = {side: LINKS[side] for side in sides or LINKS}
    return [f"cluster.{side}={{gbit_per_s: {factor * rate}, {rest}}}" for side, (rate, rest) in given.items()]


def test_marked_plans_are_those_whose_order_other_links_change(plain):
    """By brute force: recipes that give the links at half and at twice their bandwidth predict the same plans."""
    search = search_recipe(plain)
    ranked = search.ranked()
    marked = places_assumed(plain, search.maker.model, ranked)
    expected = set()
    for factor in FACTORS:
        other = load("gpus.yaml", explicit(factor))
        model = cost_model(other, planning_subject(other))
        seconds = [model.seconds(one.plan) for one in ranked[:20]]
        for place, (this, following) in enumerate(pairwise(seconds)):
            if this > following * (1 + 1e-9):
                expected |= {place, place + 1}
    assert marked == expected
    assert 0 < len(marked) < min(20, len(ranked)), "the case has both"
    assert places_assumed(plain, search.maker.model, ranked[:1]) == frozenset()

    given = load("gpus.yaml", explicit(1))
    same = cost_model(given, planning_subject(given))
    assert [same.seconds(one.plan) for one in ranked] == [one.seconds for one in ranked]
    assert places_assumed(given, same, ranked) == frozenset()
    latency = load("gpus.yaml", [f"cluster.{side}.gbit_per_s={LINKS[side][0]}" for side in LINKS])
    assert assumed_links(latency, "")
    assert places_assumed(latency, search.maker.model, ranked) == frozenset(), "only bandwidths are varied"


def test_one_line_says_what_is_assumed_and_which_keys_set_it(plain):
    line = assumed_line(plain, "")
    assert line.startswith(
        "assumed: 1200 Gbit/s and 10 µs inside a node, 100 Gbit/s on 1 lane per node and 8 µs between nodes "
        "(usual for V100-32GB); to set them: cluster.inside, cluster.outside; to measure them: "
    )
    assert "auto3d profile gpus.yaml cluster.nodes=1 (a node)" in line
    assert "auto3d doctor gpus.yaml --devices (between nodes, on SLURM)" in line
    assert "\n" not in line
    assert assumed_records(plain, "") == [
        {"key": "cluster.inside", "gbit_per_s": 1200, "lanes": None, "latency_us": 10, "usual_for": "V100-32GB"},
        {"key": "cluster.outside", "gbit_per_s": 100, "lanes": 1, "latency_us": 8, "usual_for": "V100-32GB"},
    ]


@pytest.mark.parametrize(
    ("overrides", "measured_in", "keys"),
    [
        (explicit(1), "", []),
        (explicit(1, "inside"), "", ["cluster.outside"]),
        (["cluster.inside.gbit_per_s=9"], "", ["cluster.inside.latency_us", "cluster.outside"]),
        ([], "profiles/gpus.json", ["cluster.outside"]),  # a profile is of one node
        (["cluster.nodes=1"], "profiles/gpus.json", []),
        (["cluster.nodes=1"], "", ["cluster.inside"]),
        (["cluster.devices_per_node=1"], "", ["cluster.outside"]),
        (["cluster.accelerator=null", "cluster.nodes=1"], "", ["cluster.accelerator", "cluster.inside"]),
        (["cluster.accelerator=null", "cluster.nodes=1"], "profiles/gpus.json", []),
        (["cluster.accelerator=null", *explicit(1)], "", ["cluster.accelerator"]),
        (
            ["cluster.more=[{nodes: 1, devices_per_node: 2}]", *explicit(1)],
            "",
            ["cluster.more[0].accelerator", "cluster.more[0].inside", "cluster.more[0].outside"],
        ),
    ],
)
def test_only_figures_that_are_used_and_unknown_are_named(plain, overrides, measured_in, keys):
    recipe = load("gpus.yaml", overrides)
    assert [one["key"] for one in assumed_records(recipe, measured_in)] == keys
    line = assumed_line(recipe, measured_in)
    assert bool(line) == bool(keys)
    assert f"to set them: {', '.join(keys)}" in line or not keys


def test_a_torch_without_cuda_says_that_it_captures_low_precision_by_other_rules(plain):
    low = ["training.precision=bfloat16"]
    for overrides, measured_in, known in (
        (low, "", True),
        ([], "", False),
        (low, "profiles/gpus.json", False),
        ([*low, "cluster.device=cpu"], "", False),
        ([*low, "prediction.system=megatron"], "", False),
    ):
        lines = assumed_lines(load("gpus.yaml", overrides), measured_in)
        assert any("without CUDA" in line and "in bfloat16" in line for line in lines) == (
            known and not torch.backends.cuda.is_built()
        )


def test_plan_prints_the_line_and_the_marks_only_where_something_is_assumed(plain, auto3d):
    marked, line = "~ with half or twice", "\nassumed: 1200 Gbit/s"
    shown = auto3d("plan", "gpus.yaml").out
    assert shown.count("\nassumed: ") == 1
    assert line in shown
    assert marked in shown
    record = json.loads(auto3d("plan", "gpus.yaml", "--json").out)
    assert [one["key"] for one in record["assumed"]] == ["cluster.inside", "cluster.outside"]
    places = [one["place_assumed"] for one in record["candidates"][:20]]
    assert [" ~ " in row for row in shown.splitlines()[3 : 3 + len(places)]] == places
    given = auto3d("plan", "gpus.yaml", *explicit(1)).out
    assert "assumed" not in given
    assert "~" not in given
    assert not json.loads(auto3d("plan", "gpus.yaml", *explicit(1), "--json").out)["assumed"]
    auto3d("report", "gpus.yaml", "--output", "page.html")
    page = Path("page.html").read_text()
    assert "assumed: 1200 Gbit/s" in page
    assert page.count('"place_assumed":true') == sum(places)
