"""Explicit orders that no rule makes train as plain PyTorch does."""

import random

import pytest

from auto3d.partition.methods.uniform import uniform
from auto3d.schedule.order_text import order_options
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
        stages=uniform(captured(model, 2).graph, schedule.stages),
    )
    ranks = processes.run(devices, run_rank, model, plan, SGD)
    expected = plain_pytorch(model, micro_batch_size=2, global_batch=plan.global_batch, optimizer=SGD)
    assert_parity(ranks, expected)
    if placement != "two pipes":
        assert_buffers(ranks, expected)


def peak(world, plan):
    return peak_of_rank(world, captured("gpt2-wide", SAMPLES), TRAINED["gpt2-wide"][1], plan, ADAMW, False)


@pytest.mark.parametrize("placement", ["v", *soak("straight", "interleaved", "two pipes")])
def test_the_memory_of_a_random_order(processes, placement):
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
        stages=uniform(captured("gpt2-wide", SAMPLES).graph, schedule.stages),
    )
    for held, predicted in processes.run(2, peak, plan):
        assert predicted.total == pytest.approx(held.total, rel=0.06)
