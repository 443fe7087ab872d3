"""The axis recompute of a search: none, full, a fraction, or the largest fraction that fits."""

from dataclasses import replace
from functools import cache

import pytest

from auto3d.cluster import Accelerator, Cluster, Node
from auto3d.cost.memory.plan import PlanMemory
from auto3d.cost.model import CostModel
from auto3d.cost.model_work import ModelWork
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import work_of
from auto3d.partition.merak import shard
from auto3d.partition.recompute import subgraph_starts
from auto3d.schedule import SCHEDULES, schedule_of
from auto3d.schedule.operation_times import EQUAL
from auto3d.search.kept_fractions import KeptFractions
from auto3d.search.listing import ListedCandidate, list_candidates
from auto3d.search.make import PlanMaker
from auto3d.search.planned_model import PlannedGraphs
from auto3d.search.space import Domain, SearchSpace, Workload
from auto3d.simulate.costs_text import write_times
from launch.model.candidates import shortage
from tests.models import captured
from tests.soak import soak

GIB = 2**30


def cluster_of(*memory_bytes: float | None) -> Cluster:
    """Four devices on as many nodes."""
    nodes = (Node(devices=4 // len(memory_bytes), accelerator=Accelerator(memory_bytes=each)) for each in memory_bytes)
    return Cluster(nodes=tuple(nodes), device="cpu")


def search(recompute, *, schedule=("1f1b",), memory_bytes=None, pp=(4,), size=4) -> list[ListedCandidate]:
    space = SearchSpace(
        dp=[1], pp=list(pp), micro_batch_size=[size], schedule=list(schedule), recompute=recompute,
        tp=[1], placement=["megatron"], allow_idle_devices=True,
    )  # fmt: skip
    cluster = cluster_of(memory_bytes)
    workload = Workload(global_batch=32, seed=1)

    def graph_at(size):
        return captured("gpt2", size).graph

    def missing(plan):
        return shortage(memory_at(size), plan, cluster)

    planned = PlannedGraphs(
        graph_at, lambda graph: work_of(graph, shard(graph).bounds), lambda g: shard(g).bounds, lambda *degree: {}
    )
    model = CostModel(cluster, TrainingOptions(), planned.work)
    return list(
        list_candidates(Domain(space, cluster, workload), PlanMaker(planned, model, workload, shortage=missing))
    )


@cache
def memory_at(size: int) -> PlanMemory:
    graph = captured("gpt2", size).graph
    work = work_of(graph, shard(graph).bounds)
    return PlanMemory(ModelWork(lambda *_: work, TrainingOptions()), TrainingOptions())


def needed(plan) -> float:
    return max(memory_at(4).of(plan))


@pytest.mark.parametrize("schedule", ["1f1b", "chimera", *soak("gpipe", "shifted-critical-path", "early-recompute")])
def test_auto_keeps_the_most_that_fits(schedule):
    """Against every α₁ in steps of a thousandth, in memory from too little to enough for all."""
    (full,) = search(["full" if "recompute" in SCHEDULES[schedule].options else "none"], schedule=[schedule])
    graph = captured("gpt2", 4).graph
    shares = KeptFractions(full.plan, lambda stage: subgraph_starts(graph, stage, shard(graph).bounds))
    plans = [shares.plan(step / 1000) for step in range(1001)]
    sizes = {id(plan): needed(plan) for plan in plans}
    least, most = min(sizes.values()), max(sizes.values())
    for part in (0.0, 0.2, 0.5, 0.8, 1.0):
        memory = least + part * (most - least)
        (found,) = search(["auto"], schedule=[schedule], memory_bytes=memory)
        fitting = [plan for plan in plans if sizes[id(plan)] <= memory]
        assert found.plan == fitting[-1], found.reason
    (none,) = search(["auto"], schedule=[schedule], memory_bytes=least * 0.9)
    assert none.plan is None
    assert none.reason.startswith("infeasible: pipeline device ")
    assert none.reason.endswith("GiB, even with full recomputation")


def test_a_plan_that_cannot_fit_is_refused_with_its_bytes():
    (free,) = search(["none"])
    memory = needed(free.plan) - 1
    (refused,) = search(["none"], memory_bytes=memory)
    assert refused.plan is None
    assert "infeasible: pipeline device 0 needs " in refused.reason
    assert "activations " in refused.reason
    assert refused.reason.endswith(f"a device has {memory / GIB:.3g} GiB")
    (fits,) = search(["none"], memory_bytes=memory + 1)
    assert fits.plan == free.plan
    memory, least = memory_at(4), needed(free.plan)
    assert not shortage(memory, free.plan, cluster_of(least))
    assert not shortage(memory, free.plan, cluster_of(least, None)), "unknown memory counts as enough"
    for small in range(4):
        nodes = [least if device != small else 1 for device in range(4)]
        placed = replace(free.plan, placement=((2,), (0,), (1,), (3,)))
        device = (1, 2, 0, 3)[small]
        assert f"pipeline device {device} needs" in shortage(memory, placed, cluster_of(*nodes))


def test_each_value_makes_its_own_plan():
    none, full, share, all_kept = search(["none", "full", 0.4, 1.0])
    assert none.plan.schedule_options == {}
    assert full.plan.schedule_options == share.plan.schedule_options == {"recompute": "full"}
    assert not any(stage.kept for stage in (*none.plan.stages, *full.plan.stages))
    assert share.plan.stages[-1].kept == share.plan.stages[-1].operations, "the last stage holds one micro-batch"
    assert all_kept.plan is None
    assert all_kept.reason == "the same plan as with recompute none"
    always, same = search(["none", "full"], schedule=["early-recompute"])
    assert schedule_of(always.plan).recompute
    assert same.reason == "the same plan as with recompute none"


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zb-v"])
def test_schedules_that_do_not_recompute_say_so(schedule):
    for recompute in ("full", 0.5, "auto"):
        (refused,) = search([recompute], schedule=[schedule], memory_bytes=GIB)
        assert refused.plan is None
        assert refused.reason == f"recompute: {recompute}; schedule {schedule} does not recompute: it takes none"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("recompute=full", "schedule_options: recompute is 'full'; set the key recompute instead"),
        ("chunks=4", "schedule 1f1b: option 'chunks' is unknown; its options are recompute, sync"),
        ("sync=3", "schedule 1f1b: sync is 3; it must be text"),
        ("sync=late", "schedule 1f1b: sync is 'late'; it must be one of lazy"),
        ("sync", "schedule: '1f1b:sync': write NAME:option=value, as in interleaved-1f1b:chunks=4"),
    ],
)
def test_options_that_are_not_the_schedules(options, words):
    (refused,) = search(["none"], schedule=[f"1f1b:{options}"])
    assert words in refused.reason


def test_options_of_a_schedule_make_its_plan():
    (found,) = search([0.5], schedule=["chimera:scale=halving"])
    assert found.plan.micro_batch_size == 4
    assert found.plan.schedule_options == {"scale": "halving", "recompute": "full"}
    (odd,) = search(["none"], schedule=["chimera:scale=halving"], size=1)
    assert "runs it in 2 parts: it must be a multiple of 2" in odd.reason


def test_a_schedule_for_given_times_gets_the_predicted_ones():
    (found,) = search(["none"], schedule=["zb-1p"])
    graph = captured("gpt2", 4).graph
    work = work_of(graph, shard(graph).bounds)
    model = CostModel(cluster_of(None), TrainingOptions(), lambda *_: work)
    assert found.plan.schedule_options == {"times": write_times(model.costs(found.plan))}
    assert found.plan.schedule_options["times"] != EQUAL
    (given,) = search(["none"], schedule=["zb-1p:times=1-2-3-0"])
    assert given.plan.schedule_options == {"times": "1-2-3-0"}
