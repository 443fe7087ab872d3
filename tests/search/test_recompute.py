"""The axis recompute of a search: none, full, a fraction, or the largest fraction that fits."""

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import log2

import numpy as np
import pytest

from auto3d.cluster import Accelerator, Cluster, Node, place_ranks
from auto3d.cost.memory.plan import PlanMemory
from auto3d.cost.model import CostModel
from auto3d.cost.model_work import ModelWork
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import work_of
from auto3d.partition.merak import shard
from auto3d.partition.recompute import subgraph_starts
from auto3d.plan import Plan, PlanError, stages_between
from auto3d.schedule import SCHEDULES, schedule_of
from auto3d.schedule.moments import stages_of
from auto3d.schedule.operation_times import EQUAL
from auto3d.schedule.shape import shape, shape_of
from auto3d.search.kept_fractions import KeptFractions, Limits, largest_fraction
from auto3d.search.listing import ListedCandidate, list_candidates
from auto3d.search.make import PlanMaker
from auto3d.search.planned_model import PlannedGraphs
from auto3d.search.space import Domain, SearchSpace, Workload
from auto3d.simulate.costs_text import write_times
from launch.model.candidates import shortage
from tests.cost.test_repeats import graph_of, work_at
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


class Counted(KeptFractions):
    """Kept fractions that count the plans that are made of them."""

    made = 0

    def plan(self, first: float) -> Plan:
        self.made += 1
        return super().plan(first)


def random_fractions(chance: random.Random, name: str) -> tuple[Counted, PlanMemory]:
    """Kept fractions of random stages of a model of up to ten layers, under a random schedule that recomputes."""
    graph, work, bounds = graph_of(name), work_at(name), shard(graph_of(name)).bounds
    schedule = chance.choice(
        ["1f1b", "gpipe", "chimera", "shifted-critical-path", "early-recompute", "interleaved-1f1b"]
    )
    devices, micro_batches = chance.choice([2, 4]), chance.choice([4, 8, 16])
    options = {"recompute": "full"} if "recompute" in SCHEDULES[schedule].options else {}
    stages = shape(schedule, devices=devices, micro_batches=micro_batches, options=options).stages
    cuts = bounds[1:-1] if chance.random() < 0.5 else range(1, len(graph.nodes))
    plan = Plan(
        graph="", dp=1, tp=1, pp=devices, global_batch=2 * micro_batches, micro_batch_size=2, schedule=schedule,
        schedule_options=options, placement=place_ranks(dp=1, pp=devices), seed=0,
        stages=stages_between([0, *sorted(chance.sample(cuts, stages - 1)), len(graph.nodes)]),
    )  # fmt: skip
    memory = PlanMemory(ModelWork(lambda *_: work, TrainingOptions()), TrainingOptions())
    return Counted(plan, lambda stage: subgraph_starts(graph, stage, bounds)), memory


@pytest.mark.parametrize("name", ["gpt2", "t5", *soak("llama", "vit")])
def test_the_largest_fraction_is_that_of_all_of_them_and_few_plans_are_asked(name):
    """Against each fraction from the largest on, though memory is not always larger where more is kept."""
    chance, falls, asked = random.Random(name), 0, []
    for _ in range(12):
        fractions, memory = random_fractions(chance, name)
        plans = [fractions.plan(first) for first in fractions.first]
        needs = np.array([memory.of(plan) for plan in plans])
        falls += sum(bool((after < before).any()) for before, after in pairwise(needs))
        for device in range(needs.shape[1]):
            form = shape_of(plans[0])
            kept_from = {number: fractions.kept_from[:, number] for number in stages_of(form, device)}
            assert (memory.at_least(plans[0], device, kept_from) <= needs[:, device]).all()
        sizes = sorted(set(needs.max(axis=1).tolist()))
        for least in chance.sample(sizes, min(4, len(sizes))):
            nodes = [Node(devices=1, accelerator=Accelerator(memory_bytes=least)) for _ in plans[0].placement]
            limits = Limits(memory=memory, cluster=Cluster(nodes=tuple(nodes), device="cpu"))
            fractions.made = 0
            found = largest_fraction(fractions, lambda plan: "too little", limits)
            asked.append(fractions.made <= log2(len(plans)) + 2)
            assert found == next(
                plan for plan, size in zip(plans[::-1], needs[::-1], strict=True) if size.max() <= least
            )
        nodes = [Node(devices=1, accelerator=Accelerator(memory_bytes=sizes[0] - 1)) for _ in plans[0].placement]
        limits = Limits(memory=memory, cluster=Cluster(nodes=tuple(nodes), device="cpu"))
        with pytest.raises(PlanError, match="too little, even with full recomputation"):
            largest_fraction(fractions, lambda plan: "too little", limits)
    assert falls, "otherwise a bisection would do"
    assert sum(asked) >= 0.8 * len(asked)
