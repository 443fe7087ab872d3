"""Synthesized schedules as plans: never slower than one by rule, within memory, and sought only where they may win."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from auto3d.cluster import Accelerator, Cluster, Link, Node
from auto3d.cost.layers import Layer, work_of_layers
from auto3d.cost.model import CostModel
from auto3d.cost.training_options import TrainingOptions
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.schedule import SCHEDULES, schedule_of
from auto3d.schedule.order_file import order_file
from auto3d.schedule.shape import shape_of
from auto3d.search.algorithms.exhaustive import exhaustive
from auto3d.search.axes import Candidate
from auto3d.search.bound import least_of_any_order_s
from auto3d.search.make import PlanMaker
from auto3d.search.order_certificate import certificate_of
from auto3d.search.order_problem import problem_of
from auto3d.search.planned_model import PlannedLayers
from auto3d.search.search import Budget, Search
from auto3d.search.space import Domain, SearchSpace, Workload
from auto3d.search.synthesized import seed_candidates
from auto3d.simulate.simulate import simulate
from auto3d.synthesis.problem import peaks
from tests.schedule.orders import named
from tests.soak import soak

BY_RULE = ["1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v", "chimera"]
SYNCHRONOUS = [name for name, family in SCHEDULES.items() if family.automatic]
CANDIDATE = Candidate(dp=1, tp=1, pp=4, micro_batch_size=1, schedule="synthesized")


def case(
    *,
    memory: float = 2**40,
    blocks: int = 8,
    head: float = 3.0,
    devices: int = 4,
    space: dict | None = None,
    seconds: float = 1.0,
) -> tuple[Domain, PlanMaker]:
    """Blocks, and a head of ``head`` blocks' work, on ``devices`` with ``memory`` bytes."""
    block = Layer(parameters=10**6, flops=4e9, products=1, saved=10**8, output=10**6)
    layers = (*[block] * blocks, replace(block, flops=head * block.flops))
    accelerator = Accelerator(name="one", peak_flops=1e13, memory_bytes=memory, memory_bandwidth=1e12)
    cluster = Cluster(
        nodes=(Node(devices=devices, accelerator=accelerator, inside=Link(latency_s=1e-5, bandwidth=1e10)),),
        device="cuda",
    )
    planned = PlannedLayers(
        layers=layers,
        layer_work=lambda samples, tp: work_of_layers(layers, samples, tp, precision="float32"),
        times=None,
    )
    model = CostModel(cluster, TrainingOptions(), planned.work)
    workload = Workload(global_batch=8, seed=1)
    axes = {"dp": [1], "tp": [1], "pp": [4], "micro_batch_size": [1]} | (space or {})
    return Domain(SearchSpace(**axes), cluster, workload), PlanMaker(planned, model, workload, order_seconds=seconds)


def fitting(maker: PlanMaker, schedules: Sequence[str] = BY_RULE, **choices) -> list[Plan]:
    plans = []
    for name in schedules:
        try:
            plans.append(maker.plan(replace(CANDIDATE, schedule=name, **choices)))
        except InputError:
            continue
    return plans


def test_a_found_order_beats_the_schedules_by_rule():
    _, maker = case()
    plan = maker.plan(CANDIDATE)
    assert plan.schedule == "synthesized"
    best = min(map(maker.model.seconds, fitting(maker)))
    assert maker.model.seconds(plan) < best * 0.999
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_a_found_order_fits_where_others_do_not(recompute):
    _, maker = case()
    whole = maker.model.memory.of(maker.plan(replace(CANDIDATE, schedule="1f1b")))
    _, maker = case(memory=0.7 * max(whole))
    plan = maker.plan(replace(CANDIDATE, recompute=recompute))
    assert max(maker.model.memory.of(plan)) <= 0.7 * max(whole)
    assert all(maker.model.seconds(plan) <= maker.model.seconds(one) for one in fitting(maker, recompute=recompute))


MODELS = [
    {"devices": 2, "blocks": 15, "head": 1.0},
    *soak({"devices": 4, "blocks": 23, "head": 3.0}),
    *soak({"devices": 2, "blocks": 8, "head": 3.0}, {"devices": 4, "blocks": 15, "head": 1.0}),
]


@pytest.mark.parametrize("sync", ["lazy", *soak("eager")])
@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("fraction", [0.5, *soak(1.1, 0.9, 0.7, 0.6, 0.4)])
def test_it_is_never_slower_than_any_schedule_by_rule(model, fraction, sync):
    """However short the search: of all that fit the same memory and recompute as it may, some with kept parts."""
    one = replace(CANDIDATE, pp=model["devices"], sync=sync)
    _, roomy = case(**model)
    memory = fraction * max(roomy.model.memory.of(roomy.plan(replace(one, schedule="1f1b"))))
    _, maker = case(**model, memory=memory, seconds=0.02)
    choices = {"pp": one.pp, "sync": sync}
    by_rule = {each: fitting(maker, SYNCHRONOUS, recompute=each, **choices) for each in ("none", "full", "auto")}
    assert by_rule["auto"]
    for recompute, allowed in (("none", ["none"]), ("auto", ["none", "full", "auto"])):
        if seconds := [maker.model.seconds(each) for kind in allowed for each in by_rule[kind]]:
            plan = maker.plan(replace(one, recompute=recompute))
            assert max(maker.model.memory.of(plan)) <= memory
            assert maker.model.seconds(plan) <= min(seconds)


def test_a_search_that_may_recompute_also_seeks_orders_that_do_not():
    """The bytes of recomputation count where it is allowed: beside them, the best order without it would not fit."""
    _, roomy = case()
    memory = 0.95 * max(roomy.model.memory.of(roomy.plan(replace(CANDIDATE, schedule="1f1b"))))
    seconds = {"none": 1.0, "auto": 4.0}  # auto also seeks orders that recompute, which takes longer
    makers = {each: case(memory=memory, seconds=seconds[each])[1] for each in seconds}
    none, auto = (makers[each].model.seconds(makers[each].plan(replace(CANDIDATE, recompute=each))) for each in makers)
    maker = makers["none"]
    best_by_rule = min(maker.model.seconds(one) for each in seconds for one in fitting(maker, recompute=each))
    assert none < 0.95 * best_by_rule
    assert auto < 1.03 * none


def test_stages_that_keep_a_part_recompute_the_rest():
    """Their problem has the times and bytes of what they drop; if none may recompute, those of whole stages."""
    _, maker = case()
    whole, partly = (
        maker.unlimited(replace(CANDIDATE, schedule="early-recompute", recompute=each)) for each in ("full", 0.5)
    )
    assert [stage.operations for stage in whole.stages] == [stage.operations for stage in partly.stages]
    assert any(stage.kept and stage.kept != stage.operations for stage in partly.stages)
    problem = problem_of(partly, maker.model, may_recompute=frozenset(range(4)))
    block_s, block_bytes = problem.costs.forward[0] / 3, 4e8  # stage 0 has three blocks
    for stage, recompute, kept in zip(partly.stages, problem.costs.recompute, problem.kept, strict=True):
        size, left = (sum(last - first for first, last in spans) for spans in (stage.operations, stage.kept))
        assert recompute == pytest.approx((size - left) * block_s)
        assert kept == pytest.approx(left * block_bytes, rel=0.03)
    if_none, expected = (problem_of(each, maker.model, may_recompute=frozenset()) for each in (partly, whole))
    assert replace(if_none, free=expected.free) == expected


def test_the_problem_of_a_plan_has_its_times_and_its_memory():
    """The makespan is the plan's. What fits the problem needs no more than the memory, but for small things."""
    _, maker = case()
    for name in BY_RULE:
        for recompute in ("none", "full", 0.5)[: 1 + 2 * ("recompute" in SCHEDULES[name].options)]:
            plan = maker.unlimited(replace(CANDIDATE, schedule=name, recompute=recompute))
            schedule, needed = schedule_of(plan), max(maker.model.memory.of(plan))
            _, tight = case(memory=needed)
            problem = problem_of(plan, tight.model)
            assert simulate(schedule, problem.costs).makespan == pytest.approx(maker.model.seconds(plan))
            for device, (held, free) in enumerate(zip(peaks(problem, schedule), problem.free, strict=True)):
                memory = maker.model.memory.of(plan)[device]
                assert held + needed - free >= memory * (1 - 1e-9), (name, recompute, device)
                assert held + needed - free <= memory * 1.35, (name, recompute, device)


def test_no_order_is_shorter_than_the_bound():
    _, maker = case()
    plans = maker.seeds(CANDIDATE)
    bounds = [maker.model.slowest_pipeline_s(plan, least_of_any_order_s) for plan in plans]
    assert all(bound <= maker.model.seconds(plan) for bound, plan in zip(bounds, plans, strict=True))
    assert min(bounds) <= maker.model.seconds(maker.with_best_order(CANDIDATE, plans))


@pytest.mark.parametrize("choices", [{"recompute": "auto"}, *soak({"sync": "eager"})], ids=str)
def test_no_plan_with_the_same_stages_is_shorter_than_the_certificate(choices):
    _, maker = case(memory=2e9, seconds=0.3)
    candidate = replace(CANDIDATE, **choices)
    plan = maker.plan(candidate)
    made = certificate_of(plan, maker.model, may_recompute=candidate.recompute == "auto", seconds=0.5)
    assert made.departure == ""
    assert made.makespan == maker.model.seconds(plan)
    assert 0 <= made.gap < 0.2
    bound = made.lower_bound * (1 - 1e-9)
    where = plan.stages, shape_of(plan).device_of
    others = [one for one in fitting(maker, **choices) if (one.stages, shape_of(one).device_of) == where]
    assert all(maker.model.seconds(one) >= bound for one in others)


def test_a_certificate_needs_simulated_times():
    _, maker = case()
    plan = maker.plan(replace(CANDIDATE, schedule="1f1b"))
    with pytest.raises(InputError, match="times are by amp; a bound needs simulated ones"):
        certificate_of(plan, maker.model.by("amp"), may_recompute=False, seconds=0)


def test_a_search_offers_it_as_one_more_schedule():
    domain, maker = case(space={"schedule": [*BY_RULE, "synthesized"]}, seconds=0.3)
    search = Search(domain, maker, Budget(candidates=100))
    exhaustive(search, 1)
    best = search.ranked()[0]
    assert best.candidate.schedule == "synthesized"
    assert best.seconds == maker.model.seconds(best.plan) < search.ranked()[1].seconds


def test_what_auto_leaves_out():
    """The asynchronous schedules, the one that is sought, and the one that only causal models can run."""
    domain, _ = case()
    tried = Domain(SearchSpace(), domain.cluster, domain.workload).choices["schedule"]
    seeds = {seed.schedule for seed in seed_candidates(CANDIDATE)}
    assert set(SCHEDULES) - set(tried) == {"pipedream", "pipedream-2bw", "seq1f1b", "synthesized"}
    assert seeds == set(tried)


def test_an_order_is_not_sought_where_its_bound_is_too_high():
    space = {"pp": [2, 4], "schedule": ["synthesized", "1f1b"], "allow_idle_devices": True}
    domain, maker = case(space=space, seconds=0.3)
    search = Search(domain, maker, Budget(candidates=100, best=1))
    exhaustive(search, 1)
    assert search.looked_at + search.left.candidates == len(domain) == 4
    assert search.ranked()[0].candidate.pp == 4
    (two,) = (one for one in domain if one.pp == 2 and one.schedule == "synthesized")
    assert search.bound(two) > search.fastest_s, "two devices take longer than four, in any order"
    assert search.simulated <= 2


def test_an_order_of_a_file(tmp_path):
    _, maker = case()
    other = maker.plan(replace(CANDIDATE, schedule="zb-h1"))
    file = tmp_path / "order.json"
    file.write_text(order_file(schedule_of(other), made_by="a test").to_json())
    plan = maker.plan(replace(CANDIDATE, schedule=f"synthesized:file={file}"))
    assert schedule_of(plan) == named(schedule_of(other))
    assert str(file) not in plan.to_json()
    early = maker.plan(replace(CANDIDATE, schedule=f"synthesized:file={file}", sync="eager"))
    assert early.schedule_options == plan.schedule_options | {"sync": "eager"}
    assert shape_of(plan).split == frozenset(range(4))
    for changes, words in (
        ({"pp": 2}, "order.json: schedule synthesized: the order is for 4 devices; here there are 2"),
        ({"micro_batch_size": 2}, "the order is for 8 micro-batches; here there are 4"),
        ({"recompute": "full"}, "decides what recomputes: it takes none"),
        ({"schedule": "synthesized:chunks=2"}, "found chunks; its option is file"),
        ({"schedule": f"synthesized:file={tmp_path / 'no.json'}"}, "cannot be read: No such file"),
        ({"schedule": "synthesized", "recompute": "full"}, "takes none, or auto"),
        ({"schedule": "synthesized", "recompute": 0.5}, "takes none, or auto"),
    ):
        with pytest.raises(InputError) as refusal:
            maker.plan(replace(CANDIDATE, **({"schedule": f"synthesized:file={file}"} | changes)))
        assert words in str(refusal.value)


def test_where_nothing_fits_the_refusal_names_the_memory():
    _, maker = case(memory=10**8)
    with pytest.raises(InputError, match="pipeline device") as refusal:
        maker.plan(CANDIDATE)
    assert refusal.value.kind == "memory"
