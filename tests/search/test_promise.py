"""Promises: no plan beats them, a search that begins with them loses none of the best, and it always has one plan."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import inf

import pytest

from auto3d.cluster import Cluster
from auto3d.cost.layers import work_of_layers
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.schedule import shape as schedule_shape
from auto3d.search.algorithms.annealing import annealing
from auto3d.search.algorithms.exhaustive import exhaustive
from auto3d.search.algorithms.random_search import random_search
from auto3d.search.axes import Candidate
from auto3d.search.bound import least_s
from auto3d.search.make import PlanMaker
from auto3d.search.promise import Promises
from auto3d.search.search import Search
from auto3d.search.space import Domain, SearchSpace
from tests.search.cases import random_case, searched
from tests.soak import soak

AXES = {
    "placement": ["megatron", "vertical"],
    "recompute": ["none", "full", "auto"],
    "schedule": ["1f1b", "gpipe", "shifted-critical-path", "interleaved-1f1b", "chimera", "zb-h1"],
    "shard_optimizer": [False, True],
}


@pytest.mark.parametrize("seed", [0, 1, 2, 3, *soak(4, 5, 6, 7, 8, 9)])
def test_no_plan_needs_less_time_or_memory_than_its_candidate_promises(seed):
    domain, maker = random_case(seed, **AXES, partition=["blocks", "layer-assignment"])
    promises, checked, tightest = Promises(maker), 0, 0.0
    for degrees in domain.degrees:
        of_degrees = promises.least_of_degrees_s(domain, degrees)
        for candidate in list(domain.variants(degrees))[:: 1 + seed % 3]:
            try:
                plan = maker.unlimited(candidate)
            except InputError:
                continue
            least, bound = promises.least_s(candidate), maker.model.slowest_pipeline_s(plan, least_s)
            assert of_degrees <= least <= bound * (1 + 1e-12), candidate
            assert promises.least_bytes(candidate) <= max(maker.model.memory.of(plan)), candidate
            checked, tightest = checked + 1, max(tightest, least / bound)
    assert checked > 100
    nodes = maker.model.cluster.nodes
    if len({node.accelerator for node in nodes}) == 1:  # else a promise counts on the fastest kind for all devices
        assert tightest > 0.7


def test_a_budget_ends_a_search_with_the_best_so_far_and_says_what_is_left():
    case = random_case(3, **AXES)
    whole = searched(exhaustive, case)
    assert (whole.ended_by, _met(whole) + whole.left.candidates) == ("", len(case[0]))
    assert whole.left.least_s > whole.limit(), "nothing that was left out can be among the best"
    for name, amount in {"candidates": 5, "simulations": 2, "seconds": 1e-6}.items():
        search = searched(exhaustive, case, **({name: amount} if name == "candidates" else {"budget": {name: amount}}))
        assert search.ended_by == name
        assert len(search.ranked()) >= 1
        assert _met(search) + search.left.candidates == len(case[0])
        assert (
            search.left.least_s <= whole.ranked()[0].seconds or search.ranked()[0].seconds == whole.ranked()[0].seconds
        )


def _met(search: Search) -> int:
    return search.looked_at + search.ruled_out


@pytest.mark.parametrize("seed", [1, 11, 22])
def test_every_algorithm_finds_a_plan_if_any_fits(seed):
    """With looks at a tenth of the space, and hardly more memory than the leanest of its plans needs."""
    domain, maker = random_case(seed, **AXES)
    leanest = min(max(maker.model.memory.of(plan)) for plan in _plans(domain, maker))
    nodes = (
        replace(node, accelerator=replace(node.accelerator, memory_bytes=1.01 * leanest))
        for node in domain.cluster.nodes
    )
    cluster = Cluster(nodes=tuple(nodes), device="cuda")
    domain, maker.model = Domain(SearchSpace(**AXES), cluster, domain.workload), maker.model.on(cluster)
    for algorithm in (exhaustive, annealing, random_search):
        search = searched(algorithm, (domain, maker), candidates=len(domain) // 10)
        assert search.ranked(), f"{algorithm.__name__} found none in {search.looked_at} looks"


def _plans(domain: Domain, maker: PlanMaker) -> Iterator[Plan]:
    """The plans of the space, whatever memory they need."""
    for candidate in domain:
        with suppress(InputError):
            yield maker.unlimited(candidate)


def test_the_first_look_is_free():
    search = searched(exhaustive, random_case(3), candidates=1)
    assert search.looked_at == 1
    assert search.ended_by == "candidates"


def test_candidates_that_are_the_same_plan_are_one_row():
    """On one node all placements are alike, and schedules come out as the same operations on one micro-batch."""
    domain, maker = random_case(3, placement=["megatron", "pipelines-first"], schedule=["1f1b", "gpipe"])
    search = searched(exhaustive, (domain, maker), budget={"best": 10**6})
    every = [candidate for one in search.ranked() for candidate in (one.candidate, *one.same)]
    assert len(every) == len(set(every)) == sum(search.bound(one) < inf for one in domain)
    assert search.simulated == len(search.ranked()) < len(every)
    for one in search.ranked():
        for other in one.same:
            assert maker.model.seconds(search.plan(other)) == one.seconds


def test_degrees_that_need_another_number_of_devices_are_no_part_of_a_space():
    domain, _ = random_case(2, dp="auto", tp="auto", pp="auto")
    devices = domain.cluster.devices
    assert all(one.dp * one.tp * one.pp == devices for one in domain.degrees)
    assert not any("devices" in one.reason for one in domain.refused)
    nothing = Domain(SearchSpace(dp=[devices], tp=[2], pp=[2]), domain.cluster, domain.workload)
    assert not nothing.degrees
    assert nothing.refused.foremost.reason == f"needs {4 * devices} devices; the cluster has {devices}"


def test_more_devices_than_subgraphs_list_no_schedule(monkeypatch):
    """The operations of so many devices would be the longest of a search."""
    domain, maker = random_case(2, pp="auto", schedule=["chimera", "interleaved-1f1b"])
    built: list[int] = []
    build = schedule_shape.build_schedule
    monkeypatch.setattr(
        schedule_shape,
        "build_schedule",
        lambda name, **sizes: (built.append(sizes["devices"]), build(name, **sizes))[1],
    )
    schedule_shape._shape.cache_clear()
    deepest = max(one.pp for one in domain.degrees)
    layers = maker.planned.layers[: deepest - 1]
    maker.planned = replace(
        maker.planned, layers=layers, layer_work=lambda samples, tp: work_of_layers(layers, samples, tp)
    )
    search = searched(exhaustive, (domain, maker))
    assert max(built) < deepest
    assert any("each stage needs one" in one.reason for one in search.refused())


def test_placements_with_equal_nodes_cost_one_estimate(monkeypatch):
    """All nodes are alike, and each holds one stage: whichever rank of a node has which place, the plan is the same."""
    domain, maker = random_case(2, placement="auto", schedule=["1f1b"], recompute=["none"], partition=["blocks"])
    made: list[Candidate] = []
    plan = maker.plan
    monkeypatch.setattr(maker, "plan", lambda candidate: (made.append(candidate), plan(candidate))[1])
    search = searched(exhaustive, (domain, maker), budget={"best": 10**6})
    assert search.looked_at == len(domain) > len(made) > 0
    for one in search.ranked():
        for other in one.same:
            assert plan(other).stages == one.plan.stages
            assert maker.model.seconds(plan(other)) == one.seconds
