"""Stages cut for what each of them recomputes: the cost model's own times, and never slower than equal blocks."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest

from auto3d.errors import InputError
from auto3d.partition.methods import METHODS
from auto3d.plan import Plan
from auto3d.schedule.shape import shape_of
from auto3d.search.axes import Candidate
from auto3d.search.kept_fractions import largest_fraction
from auto3d.search.make import PlanMaker
from launch.model.candidates import task
from launch.model.costs import cost_model, planning_subject
from launch.recipe.load import load
from tests.soak import soak

SCHEDULES = ("1f1b", "shifted-critical-path")
RECIPES = [
    "gpt1.4b",
    *soak("bert48", "gpt2.5b", "gpt8.3b", "gpt20b", "gpt2-64", "llama3-8b", "t5-11b", "vit-22b", "mixed"),
]


@cache
def maker_of(recipe: str, *overrides: str) -> PlanMaker:
    loaded = load(recipe, overrides)
    planned = planning_subject(loaded, only_predicted=True)
    return PlanMaker(planned, cost_model(loaded, planned), task(loaded))


def candidates(maker: PlanMaker, recompute: str | float) -> Iterator[Candidate]:
    """Depths of 2 to 16 stages on all devices, with as many pipelines as divide the batch."""
    devices, batch = maker.model.cluster.devices, maker.workload.global_batch
    for pp in (2, 4, 8, 16):
        fitting = [dp for dp in range(1, devices // pp + 1) if devices % (pp * dp) == 0 and batch % dp == 0]
        for size in (1, 2):
            for schedule in SCHEDULES:
                if devices % pp == 0 and batch % (fitting[-1] * size) == 0:
                    yield Candidate(
                        dp=fitting[-1], tp=1, pp=pp, micro_batch_size=size, schedule=schedule, recompute=recompute
                    )


def made(maker: PlanMaker, candidate: Candidate, partition: str) -> Plan | None:
    try:
        with_partition = replace(candidate, partition=partition)
        return maker.plan(with_partition) if candidate.recompute == "auto" else maker.unlimited(with_partition)
    except InputError:
        return None


@pytest.mark.parametrize("recompute", ["full", 0.5, "auto"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_autopipe_is_never_slower_than_equal_blocks(recipe, recompute):
    maker, compared, faster = maker_of(recipe), 0, 0
    for candidate in candidates(maker, recompute):
        blocks, balanced = made(maker, candidate, "blocks"), made(maker, candidate, "autopipe")
        if blocks is None:
            continue
        assert balanced is not None, candidate
        equal_s, balanced_s = maker.model.seconds(blocks), maker.model.seconds(balanced)
        assert balanced_s <= equal_s, candidate
        compared, faster = compared + 1, faster + (balanced_s < equal_s)
    assert compared > 0 or recompute == "auto", "under auto, no plan of a large model may fit"
    assert faster > 0 or compared < 4


@pytest.mark.parametrize(("stages", "size", "fastest"), [(4, 1, "own"), (8, 1, "own"), (4, 2, "blocks")])
def test_gpt_1_4b_gains_by_a_cut_that_knows_what_recomputes(stages, size, fastest):
    """The last stage of the shifted critical path does not recompute, so it takes more of the model than under 1F1B.

    With 4 stages and 2 samples, equal blocks make a faster pipeline than the stages whose slowest is the fastest.
    """
    maker = maker_of("gpt1.4b")
    candidate = Candidate(
        dp=64 // stages, tp=1, pp=stages, micro_batch_size=size, schedule="shifted-critical-path", recompute="full"
    )
    own = maker._made(replace(candidate, partition="autopipe"))
    alike = replace(own, stages=maker._made(replace(candidate, partition="autopipe", schedule="1f1b")).stages)
    blocks, plan = made(maker, candidate, "blocks"), made(maker, candidate, "autopipe")
    assert blocks is not None
    assert plan is not None
    assert own.stages[-1].operations[0][0] < alike.stages[-1].operations[0][0]
    assert max(stage_seconds(maker, own)) < 0.94 * max(stage_seconds(maker, alike))
    assert maker.model.seconds(plan) < 0.975 * maker.model.seconds(alike)
    assert plan.stages == (own if fastest == "own" else blocks).stages
    assert (maker.model.seconds(own) > maker.model.seconds(blocks)) == (fastest == "blocks")


def stage_seconds(maker: PlanMaker, plan: Plan) -> list[float]:
    """The seconds of the computation of one micro-batch on each stage, by the costs that the simulator takes."""
    costs, recompute = maker.model.costs(plan), shape_of(plan).recompute
    again = [time if number in recompute else 0.0 for number, time in enumerate(costs.recompute)]
    return [sum(times) for times in zip(costs.forward, costs.backward, again, strict=True)]


@pytest.mark.parametrize("schedule", [*SCHEDULES, "interleaved-1f1b", "early-recompute"])
@pytest.mark.parametrize("ends", ["true", "false"])
def test_a_partition_sees_the_times_of_the_plan(schedule, ends):
    """Also where full recomputation leaves out embedding and head. This accelerator takes no time beside operations."""
    maker = maker_of("gpt1.4b", f"prediction.recompute_ends={ends}")
    candidate = Candidate(dp=8, tp=1, pp=4, micro_batch_size=2, schedule=schedule, recompute="full")
    for partition in ("autopipe", "blocks"):
        plan = maker._made(replace(candidate, partition=partition))
        bounds = [0, *(stage.operations[-1][1] for stage in plan.stages)]
        before = maker.model.pipeline_times(plan, bounds).before
        seen = [before[number][number + 1] - before[number][number] for number in range(len(plan.stages))]
        assert stage_seconds(maker, plan) == pytest.approx(seen, rel=1e-9)
    alike = len({id(one) for one in before}) == 1
    assert alike == (schedule != "shifted-critical-path")


def test_kept_fractions_and_the_cut_are_found_in_turns():
    """No plan is slower than the one of the first cut, nor than that of the cut for what its own stages keep."""
    maker, compared, moved = maker_of("gpt1.4b"), 0, 0
    for partition, method in METHODS.items():
        for candidate in candidates(maker, "auto") if method.balances_time else ():
            wanted = replace(candidate, partition=partition)
            if not method.cuts_in_turns:  # cut once, as if all stages recomputed everything
                with suppress(InputError):
                    everything = maker._made(replace(wanted, schedule="1f1b", recompute="full"))
                    assert maker._made(wanted).stages == everything.stages
                continue
            try:
                plan = maker._fitting(wanted)
            except InputError:
                continue
            bare = replace(plan, stages=tuple(replace(stage, kept=()) for stage in plan.stages))
            again = maker._made(wanted, kept=maker._kept_fractions(bare).of(plan))
            for start in (maker._made(wanted), again):
                try:
                    other = largest_fraction(maker._kept_fractions(start), maker._shortage, maker._limits)
                except InputError:
                    continue
                assert maker.model.seconds(plan) <= maker.model.seconds(other), wanted
                compared, moved = compared + 1, moved + (other.stages != plan.stages)
    assert compared > 20
    assert moved > 5
