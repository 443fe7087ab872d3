"""Autopipe in searches: the fastest stages that fit the memory of the devices, against brute force over all cuts."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from auto3d.cluster import Accelerator, Cluster, Node
from auto3d.errors import InputError
from auto3d.partition.methods import STAGE_METHODS
from auto3d.partition.recompute import kept_fractions
from auto3d.plan import Plan, StagePlan, stages_between
from auto3d.schedule.shape import shape_of
from auto3d.search.axes import Candidate
from auto3d.search.make import PlanMaker, shortage_of
from auto3d.search.problem import CandidateProblem
from tests.search.cases import random_case
from tests.soak import soak

SEEDS = (1, 8, 9, 12, 18, 24, 38)  # cases in which some candidates fit only with other than the fastest stages


def slowest_s(maker: PlanMaker, plan: Plan, recompute: str | float = "none") -> float:
    """Seconds of the slowest stage of ``plan``, as the partition methods see them."""
    cuts = maker.planned.cuts(1)
    kept = kept_fractions(shape_of(plan).in_flight, recompute) if isinstance(recompute, float) else ()
    times = zip(plan.stages, maker.model.pipeline_times(plan, cuts, kept=kept).before, strict=True)
    before = [(stage.operations, dict(zip(cuts, seconds, strict=True))) for stage, seconds in times]
    return max(seconds[last] - seconds[first] for operations, seconds in before for first, last in operations)


def every_cut(maker: PlanMaker, candidate: Candidate, stages: int) -> list[Plan]:
    """The plans of ``candidate`` under all contiguous cuts in which every stage takes some time."""
    cuts = maker.planned.cuts(1)
    base = maker.unlimited(candidate)
    pipeline = maker.model.pipeline_times(base, cuts)
    plans = []
    for inner in combinations(range(1, len(cuts) - 1), stages - 1):
        bounds = (0, *inner, len(cuts) - 1)
        if all(pipeline.before[0][last] > pipeline.before[0][first] for first, last in pairwise(bounds)):
            if candidate.recompute in ("none", "full"):
                plans.append(replace(base, stages=stages_between([cuts[bound] for bound in bounds])))
            else:  # each stage keeps a different fraction
                plans.append(maker.unlimited(replace(candidate, cuts=bounds)))
    return plans


def short_cases(schedule: str, recompute: str | float) -> Iterator[tuple[PlanMaker, Candidate, list[Plan]]]:
    """Candidates whose fastest stages do not fit, each with those plans of all its cuts that do; few cuts to try."""
    for seed in SEEDS:
        domain, maker = random_case(
            seed, schedule=[schedule], recompute=[recompute], partition=["autopipe"], placement=["megatron"]
        )
        for degrees in domain.degrees:
            candidate = next(domain.variants(degrees))
            try:
                fastest = maker.unlimited(candidate)
            except InputError:
                continue
            stages = len(fastest.stages)
            if 1 < stages <= 4 and stages * len(maker.planned.layers) <= 64 and shortage_of(maker.model, fastest):
                plans = every_cut(maker, candidate, stages)
                yield maker, candidate, [plan for plan in plans if not shortage_of(maker.model, plan)]


@pytest.mark.parametrize(
    ("schedule", "recompute"), [("1f1b", "none"), ("gpipe", "full"), ("1f1b", 0.4), *soak(("zb-h1", "none"))]
)
def test_too_little_memory_gives_the_fastest_stages_that_fit(schedule, recompute):
    """One stage on each device; clusters of one and of two kinds of devices. A rival is taken only if it is faster."""
    fitting = refused = 0
    for maker, candidate, possible in short_cases(schedule, recompute):
        if not possible:
            refused += 1
            with pytest.raises(InputError, match="GiB; it has"):
                maker.plan(candidate)
            continue
        fitting += 1
        best = min(slowest_s(maker, plan, recompute) for plan in possible)
        balanced, plan = maker._fitting(candidate), maker.plan(candidate)
        assert slowest_s(maker, balanced, recompute) == pytest.approx(best, rel=1e-9), str(candidate)
        assert plan == balanced or maker.model.seconds(plan) < maker.model.seconds(balanced)
    assert fitting >= 1
    assert refused > 10


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", *soak("chimera")])
def test_devices_with_several_stages_get_stages_that_fit(schedule):
    """The search for them is no proof, but it finds most, and as fast ones."""
    fitting = found = 0
    for maker, candidate, possible in short_cases(schedule, "none"):
        try:
            plan = maker.plan(candidate)
        except InputError:
            fitting += bool(possible)
            continue
        assert not shortage_of(maker.model, plan)
        fitting, found = fitting + 1, found + 1
        best = min(slowest_s(maker, one) for one in possible)
        assert best <= slowest_s(maker, plan) * (1 + 1e-9) <= 1.3 * best
    assert found >= 0.8 * fitting > 2


def test_only_stages_that_can_be_part_of_a_partition_are_estimated(monkeypatch):
    """Of two stages, one begins with the model and one ends with it, so there are two for each cut."""
    domain, maker = random_case(8, pp=[2], schedule=["1f1b"], recompute=["none"])
    plan, cuts, estimated = maker.unlimited(domain.degrees[0]), maker.planned.cuts(1), Counter[StagePlan]()
    estimate = maker.model.memory.of_stage

    def counted(plan: Plan, number: int, stage: StagePlan) -> dict[int, float]:
        estimated[stage] += 1
        return estimate(plan, number, stage)

    monkeypatch.setattr(maker.model.memory, "of_stage", counted)
    for fraction in (0.6, 0.8, 1.0):
        estimated.clear()
        limits = [fraction * size for size in maker.model.memory.of(plan)]
        problem = CandidateProblem(
            planned=maker.planned,
            model=maker.model,
            plan=plan,
            shape=shape_of(plan),
            samples=plan.micro_batch_size,
            limits=limits,
        )
        assert problem.earliest is not None
        assert 0 < estimated.total() < len(cuts) + 2 * len(cuts).bit_length()


def test_a_smaller_count_of_the_makers_own_is_respected():
    """Where the maker finds memory short that the cost model finds enough, as the runtime's own count may."""
    _, maker = random_case(4, partition=["autopipe"])
    candidate = Candidate(dp=1, tp=1, pp=4, micro_batch_size=1, partition="autopipe")
    plan = maker.unlimited(candidate)
    memory = maker.model.memory.of(plan)
    node = Node(devices=4, accelerator=Accelerator(memory_bytes=max(memory) * 1.001))
    model = maker.model.on(Cluster(nodes=(node,) * 4, device="cuda"))

    def shortage(plan: Plan) -> str:
        return "too much" if max(model.memory.of(plan)) > 0.97 * max(memory) else ""

    assert PlanMaker(maker.planned, model, maker.workload).plan(candidate).stages == plan.stages
    smaller = PlanMaker(maker.planned, model, maker.workload, shortage=shortage).plan(candidate)
    assert max(model.memory.of(smaller)) <= 0.97 * max(memory)
    assert slowest_s(maker, smaller) > slowest_s(maker, plan)


def test_enough_memory_and_unknown_memory_change_nothing():
    for seed in range(6):
        domain, maker = random_case(seed, partition=["autopipe"], placement=["megatron"], recompute=["none", "full"])
        unknown = [
            replace(node, accelerator=replace(node.accelerator, memory_bytes=None)) for node in domain.cluster.nodes
        ]
        free = PlanMaker(maker.planned, maker.model.on(Cluster(nodes=tuple(unknown), device="cuda")), maker.workload)
        for number, candidate in enumerate(domain):
            if number % 37 == 0:
                try:
                    fastest = maker.unlimited(candidate)
                except InputError:
                    continue
                assert free.plan(candidate) == fastest
                if not shortage_of(maker.model, fastest):
                    assert maker.plan(candidate) == fastest


def test_only_methods_that_take_a_number_of_stages_cut_candidates():
    _, maker = random_case(0)
    candidate = Candidate(dp=1, tp=1, pp=2, micro_batch_size=1)
    for name in STAGE_METHODS:
        assert len(maker.unlimited(replace(candidate, partition=name)).stages) == 2
    with pytest.raises(InputError, match=r"partition: 'autopip' is not known; .* did you mean autopipe\?"):
        maker.unlimited(replace(candidate, partition="autopip"))
    with pytest.raises(InputError, match="partition: 'rannc' is not known"):
        maker.unlimited(replace(candidate, partition="rannc"))
