"""Merak's items: experiments measure what they say, and the simulator has the paper's formulas at the items' sizes."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from auto3d.cost.sub_pipelined import sub_pipelined_s
from auto3d.cost.times import times_of
from auto3d.data import Batches, DataError
from auto3d.plan import Plan, StagePlan
from auto3d.runtime.measurement import Measurement, Status
from auto3d.schedule import build_schedule
from auto3d.simulate.costs import uniform
from auto3d.simulate.simulate import simulate
from launch.model.costs import planning_subject
from launch.model.graphs import PlanningModel
from launch.papers.experiments.merak_availability import difference
from launch.papers.experiments.merak_layer import fitted_accelerator, measured_layers, predicted_layers
from launch.papers.experiments.merak_loader import NON_SPLIT, SPLIT, split_loader, stage_inputs
from launch.papers.experiments.merak_sharding import (
    CACHED,
    CACHED_AND_BUILT,
    WITHOUT_CACHE,
    sharding_times,
    stage_subgraphs,
)
from launch.papers.item import file_of, read_item
from launch.recipe.data import data_settings
from launch.recipe.load import load, load_groups
from launch.recipe.settings import cluster

DEPTHS = (4, 8, 16, 32, 64)  # figure 10a has twice as many micro-batches
SHIFTED = "shifted-critical-path"
HEAD = 316 / (2 * 244)  # forward FLOPs of the head over those of two layers of hidden size 3072 at 1,024 tokens
PLAN = Plan(
    graph="",
    dp=1,
    tp=1,
    pp=1,
    global_batch=2,
    micro_batch_size=1,
    schedule="1f1b",
    stages=(StagePlan(operations=((0, 1),)),),
    placement=((0,),),
    seed=1,
)


def tell(line: str) -> None:
    """Progress that nobody reads."""


def test_split_loader_reads_only_what_its_stages_use() -> None:
    assert stage_inputs("tiny", [], 1) == [("input_ids", "labels")]
    assert stage_inputs("tiny", [], 4) == [("input_ids",), (), (), ("labels",)]
    arguments = {"recipe": "tiny", "overrides": [], "stages": [1, 2, 4], "micro_batch_sizes": [1, 4]}
    rows = list(split_loader(tell=tell, micro_batches=2, repetitions=1, **arguments))
    found = {(*row.setting, row.system): row.values for row in rows}
    assert len(found) == len(rows) == 3 * 2 * 2
    for stages, size in product((1, 2, 4), (1, 4)):
        each = [found[f"{stages} stages", f"micro-batch {size}", system] for system in (NON_SPLIT, SPLIT)]
        bytes_of_one = size * 128 * 8  # 128 tokens as 64-bit integers
        assert each[0]["kib"] == 2 * bytes_of_one / 1024
        assert each[1]["kib"] == 2 * bytes_of_one / stages / 1024
        assert each[1]["kib_of_loading_ranks"] == (2 if stages == 1 else 1) * bytes_of_one / 1024
        assert all(one["ms"] > 0 for one in each)


def test_a_stage_without_inputs_never_opens_the_corpus() -> None:
    settings = replace(data_settings(load("tiny").values), files=("/nonexistent/corpus",))
    batches = Batches(settings, seed=1, global_batch=2, micro_batch_size=2)
    assert batches.micro_batch(0, 0, ()) == {}
    with pytest.raises(DataError, match="nonexistent"):
        batches.micro_batch(0, 0, ("labels",))


@pytest.mark.parametrize("stages", DEPTHS)
def test_shifted_critical_path_saves_what_the_paper_derives(stages: int) -> None:
    plain, early, shifted = (_seconds(name, stages, head=0.0) for name in ("1f1b", "early-recompute", SHIFTED))
    assert plain == pytest.approx(4 * (stages - 1) + 8 * stages)
    assert early == pytest.approx(3 * (stages - 1) + 8 * stages)
    assert shifted == pytest.approx(3 * (stages - 2) + 8 * stages)


@pytest.mark.parametrize("stages", DEPTHS)
def test_a_head_makes_the_saving_that_of_figure_10a(stages: int) -> None:
    """The last stage is the critical one under 1F1B and, without its recomputation, under the shifted path too."""
    plain, shifted = (_seconds(name, stages, head=HEAD) for name in ("1f1b", SHIFTED))
    assert plain == pytest.approx(2 * stages * (4 + 3 * HEAD) + 4 * (stages - 1))
    assert shifted == pytest.approx(2 * stages * (3 + 3 * HEAD) + 3 * (stages - 1))
    assert 0.18 < 1 - shifted / plain < 0.22


def _seconds(name: str, stages: int, *, head: float) -> float:
    """Forwards of a stage without head that an iteration takes; the head of the last stage is not recomputed."""
    options = {"recompute": "full"} if name == "1f1b" else {}
    schedule = build_schedule(name, devices=stages, micro_batches=2 * stages, **options)
    costs = uniform(schedule)
    forward = (*costs.forward[:-1], 1 + head)
    backward = (*costs.backward[:-1], 2 + 2 * head)
    halves = {"backward_input": backward, "backward_weight": (0.0,) * stages}
    return simulate(schedule, replace(costs, forward=forward, backward=backward, **halves)).makespan


@pytest.mark.parametrize("share", [0.25, 1.0, 2.0, 4.0])
def test_sub_pipelining_takes_what_section_5_3_gives_for_24_layers(share: float) -> None:
    layers, compute, exchange = 24, 1.0, share
    blocks = 2 * layers
    forward = sub_pipelined_s([(compute / 4, exchange / 4)] * blocks)
    backward = sub_pipelined_s([(2 * compute / 4, exchange / 4)] * blocks)
    assert forward == pytest.approx(compute / 4 + (layers - 0.25) * max(compute, exchange) + exchange / 4)
    assert backward == pytest.approx(compute / 2 + (layers - 0.25) * max(2 * compute, exchange) + exchange / 4)


def test_cached_sharding_captures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTO3D_CACHE", str(tmp_path))
    rows = sharding_times(tell=tell, recipe="tiny", models={"two": ["model.config.n_layer=2"]})
    fresh = next(rows)

    def captured_here(*_: object) -> None:
        raise AssertionError("captured again")

    monkeypatch.setattr(PlanningModel, "captured_here", captured_here)
    cached, built = rows
    assert (fresh.system, cached.system, built.system) == (WITHOUT_CACHE, CACHED, CACHED_AND_BUILT)
    for row in (fresh, cached, built):
        assert row.setting == ("two",)
        assert row.values["subgraphs"] == 2 * 2 + 3  # embedding, blocks, last norm, head
    with pytest.raises(AssertionError, match="captured again"):
        next(sharding_times(tell=tell, recipe="tiny", models={"two": ["model.config.n_layer=2"]}))


def _small_gpt(layers: int) -> dict[str, Any]:
    config = {"n_layer": layers, "n_embd": 64, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    return {"model": {"architecture": "GPT2LMHeadModel", "config": config | {"bos_token_id": 0, "eos_token_id": 0}}}


SHORT = {"data": {"source": "synthetic", "sequence_length": 32, "vocabulary_size": 64}}


def test_the_predicted_layer_is_the_difference_of_models_that_differ_by_one() -> None:
    base = SHORT | {"cluster": {"accelerator": "RTX3090-24GB"}}
    arguments = {"module": "transformer.h.1", "micro_batch_sizes": [2, 16]}
    (row, _) = predicted_layers(tell=tell, base=base, layers={"small": _small_gpt(3)}, **arguments)
    recipes = [load_groups("small", Path("small"), base | _small_gpt(layers)) for layers in (3, 4)]
    device = cluster(recipes[0]).slowest([0])
    whole = [times_of(planning_subject(one, only_predicted=True).work(2), device).table[:, -1] for one in recipes]
    forward, forward_launch, backward, backward_launch, _ = whole[1] - whole[0]
    seconds = max(forward, forward_launch) + max(backward, backward_launch)
    assert row.values["ms_per_sample"] == pytest.approx(1e3 * seconds / 2)


def test_a_measured_layer_takes_longer_for_more_samples() -> None:
    arguments = {"module": "transformer.h.1", "micro_batch_sizes": [1, 32]}
    one, many = measured_layers(tell=tell, base=SHORT, layers={"small": _small_gpt(3)}, **arguments)
    assert 0 < one.values["ms_per_sample"] < 32 * many.values["ms_per_sample"]
    assert many.values["against_largest"] == 1
    assert one.values["against_largest"] > 1, "small operations cost more per sample"


def test_the_speed_of_the_rtx_3090_is_that_of_published_layers() -> None:
    """The figures of the accelerator's file come out of the fit that item merak-fig6 names as their source."""
    arguments = read_item(file_of("merak-fig6")).parts[-1].arguments
    figures = {(row.system, *row.setting): row.values["figure"] for row in fitted_accelerator(tell=tell, **arguments)}
    for name in ("matrix_efficiency", "half_gflops"):
        assert figures["fitted", name] == pytest.approx(figures["in the file", name], rel=0.05)
    assert figures["fitted", "mean error"] < 0.1


def test_stages_together_hold_all_subgraphs() -> None:
    rows = list(stage_subgraphs(tell=tell, recipe="tiny", overrides=[], stages=4, methods=["autopipe", "blocks"]))
    for method in ("autopipe", "blocks"):
        counts = [row.values["subgraphs"] for row in rows if row.system == method]
        assert len(counts) == 4
        assert sum(counts) == 2 * 8 + 3


def test_a_training_that_differs_from_one_process_does_not_count() -> None:
    alone = Measurement(plan=PLAN, status=Status.OK, iteration_s=[1.0, 1.0], loss=[5.0, 4.0])
    same = replace(alone, loss=[5.0, 4.0 * (1 + 9e-6)])
    assert difference(alone, same) == ""
    assert "its last loss" in difference(alone, replace(alone, loss=[5.0, 4.0 * (1 + 2e-5)]))
    assert "its last loss" in difference(alone, replace(alone, loss=[5.0, float("nan")]))
    assert difference(alone, None)
    assert "no memory" in difference(alone, replace(alone, status=Status.OOM, error="no memory", loss=[]))
    assert "no memory" in difference(replace(alone, status=Status.OOM, error="no memory", loss=[]), same)
