"""Explicit orders that no rule makes train as plain PyTorch does: random ones, and orders that the search found."""

import random
from itertools import product

import pytest

from auto3d.schedule.operation import Kind
from auto3d.schedule.order_text import order_options
from auto3d.simulate.simulate import simulate
from auto3d.synthesis.problem import peaks
from tests.distributed.found_orders import BY_NAME, FOUND
from tests.distributed.grid import MODELS, ONE_COPY, kept_fractions_of
from tests.distributed.parity import ADAMW, SGD, assert_buffers, assert_parity, make_plan, plain_pytorch, run_rank
from tests.live_tensors import peak_of_rank
from tests.memory_grid import SAMPLES
from tests.models import TRAINED, captured
from tests.schedule.orders import random_order
from tests.soak import soak

MORE = [
    ("straight", 4, 9, "vit-dropout"),
    ("interleaved", 2, 5, "t5-dropout"),
    ("interleaved", 4, 8, "bert-dropout"),
    ("v", 4, 7, "t5-dropout"),
]


@pytest.mark.parametrize(
    ("placement", "devices", "micro_batches", "model"),
    [("v", 2, 4, "gpt2-dropout"), ("two pipes", 4, 6, "bert-dropout"), *soak(*MORE)],
)
def test_random_orders(processes, placement, devices, micro_batches, model):
    """With split backwards beside whole ones on one stage, and stages that recompute early, inside B, or not at all."""
    chance = random.Random(devices * micro_batches)
    schedule = random_order(chance, placement, devices=devices, micro_batches=micro_batches)
    plan = make_plan(
        model,
        dp=1,
        pp=devices,
        micro_batches=micro_batches,
        schedule="synthesized",
        options=order_options(schedule),
    )
    ranks = processes.run(devices, run_rank, model, plan, SGD)
    expected = plain_pytorch(model, micro_batch_size=2, global_batch=plan.global_batch, optimizer=SGD)
    assert_parity(ranks, expected)
    if placement != "two pipes":
        assert_buffers(ranks, expected)


@pytest.mark.parametrize(
    ("placement", "seed", "model"),
    [
        ("v", 3, "gpt2-dropout"),
        ("straight", 3, "t5-dropout"),
        *soak(("v", 1, "t5-dropout"), ("straight", 1, "residual")),
    ],
)
def test_stages_that_keep_a_part(processes, placement, seed, model):
    """Stage 0 recomputes a part of itself, early or inside B; in the V, another keeps all and has operations R."""
    schedule = random_order(random.Random(seed), placement, devices=2, micro_batches=4)
    plan = make_plan(model, dp=1, pp=2, micro_batches=4, schedule="synthesized", options=order_options(schedule))
    plan = kept_fractions_of(captured(model, 2).graph, plan).plan(0.5)
    assert 0 in schedule.recompute
    assert plan.stages[0].kept not in ((), plan.stages[0].operations)
    ranks = processes.run(2, run_rank, model, plan, SGD)
    expected = plain_pytorch(model, micro_batch_size=2, global_batch=plan.global_batch, optimizer=SGD)
    assert_parity(ranks, expected)
    assert_buffers(ranks, expected)


SUITE = [("v-4-recompute", "gpt2-dropout"), ("two-way-4", "bert-dropout"), ("straight-2-recompute", "residual")]
GRID = [
    (str(found), model)
    for found, (model, most) in product(FOUND, MODELS.items())
    if found.stages <= most and (found.placement != "two-way" or model not in ONE_COPY)
]


@pytest.mark.parametrize(
    ("name", "model"),
    [*SUITE, *(pytest.param(*cell, marks=pytest.mark.parity) for cell in GRID if cell not in SUITE)],
)
def test_found_orders(processes, name, model):
    found = BY_NAME[name]
    plan = make_plan(model, dp=1, **found.choices)
    ranks = processes.run(found.devices, run_rank, model, plan, SGD)
    expected = plain_pytorch(model, micro_batch_size=2, global_batch=plan.global_batch, optimizer=SGD)
    assert_parity(ranks, expected)
    if found.placement != "two-way":  # each copy of a stage has buffers of its own
        assert_buffers(ranks, expected)


@pytest.mark.parametrize("found", FOUND, ids=str)
def test_found_orders_fit_their_problem_and_beat_every_rule(found):
    """`python -m tests.distributed.found_orders` makes the files again."""
    schedule, structure = found.schedule(), found.structure()
    problem, by_rule = structure.problem, structure.best_by_rule()
    assert max(peaks(problem, schedule)) <= min(problem.free)
    assert by_rule is None or simulate(schedule, problem.costs).makespan < by_rule[0]
    if not found.recompute:
        assert not schedule.recompute


def test_found_orders_split_and_recompute():
    """Among the saved orders are stages that split, that recompute, and that do both."""
    kinds = {
        (operation.kind is Kind.BACKWARD_INPUT, operation.stage in schedule.recompute)
        for schedule in (found.schedule() for found in FOUND)
        for operations in schedule.operations
        for operation in operations
        if operation.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
    }
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}


def peak(world, plan):
    return peak_of_rank(world, captured("gpt2-wide", SAMPLES), TRAINED["gpt2-wide"][1], plan, ADAMW, False)


@pytest.mark.parametrize(
    ("placement", "kept"),
    [("v", 0.0), ("v", 0.5), *soak(("straight", 0.0), ("interleaved", 0.0), ("two pipes", 0.0), ("straight", 0.5))],
)
def test_the_memory_of_a_random_order(processes, placement, kept):
    """Stages that split some of their backwards, and recompute, hold the predicted bytes within 6 %."""
    schedule = random_order(random.Random(3), placement, devices=2, micro_batches=6)
    plan = make_plan(
        "gpt2-wide",
        dp=1,
        pp=2,
        micro_batch_size=SAMPLES,
        micro_batches=6,
        schedule="synthesized",
        options=order_options(schedule),
    )
    if kept:
        plan = kept_fractions_of(captured("gpt2-wide", SAMPLES).graph, plan).plan(kept)
    for held, predicted in processes.run(2, peak, plan):
        assert predicted.total == pytest.approx(held.total, rel=0.06)
