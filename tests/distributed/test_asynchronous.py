"""Asynchronous schedules equal plain PyTorch on one process that keeps all versions of its weights."""

from dataclasses import replace

import pytest

from auto3d.runtime.layout import schedules_of
from auto3d.schedule.weight_versions import weight_copies
from tests.distributed.asynchronous import (
    ITERATIONS,
    NO_CLIPPING,
    assert_parity,
    plain_pytorch_with_old_weights,
    run_rank,
)
from tests.distributed.parity import make_plan
from tests.soak import soak

PIPEDREAM = [  # models without tied parameters
    ("llama", 1, 4, 4, {}),
    ("llama", 2, 2, 3, {"recompute": "full"}),
]
DOUBLE_BUFFERED = [
    ("gpt2", 2, 2, 3, {}),
    ("t5", 1, 4, 3, {}),
    ("averaging", 1, 2, 4, {"recompute": "full"}),
    ("residual", 1, 3, 4, {}),
]
ALIKE = [
    ("pipedream", "vit", 1, 4, 6, {"recompute": "full", "sync": "eager"}),
    ("pipedream-2bw", "llama", 1, 4, 4, {}),
    ("pipedream", "llama", 1, 2, 4, {}),
    ("pipedream", "vit", 1, 4, 1, {}),
    ("pipedream-2bw", "gpt2", 1, 2, 4, {"recompute": "full"}),
    ("pipedream-2bw", "bert", 1, 4, 5, {"recompute": "full"}),
    ("pipedream-2bw", "llama", 2, 1, 2, {}),
]


@pytest.mark.parametrize(
    ("schedule", "model", "dp", "pp", "micro_batches", "options"),
    [
        *(("pipedream", *case) for case in PIPEDREAM),
        *(("pipedream-2bw", *case) for case in DOUBLE_BUFFERED),
        *soak(*ALIKE),
    ],
)
def test_equals_plain_pytorch_with_weights_as_old(processes, schedule, model, dp, pp, micro_batches, options):
    plan = make_plan(model, dp=dp, pp=pp, micro_batches=micro_batches, schedule=schedule, options=options)
    ranks = processes.run(plan.ranks, run_rank, model, plan)
    assert_parity(ranks, plain_pytorch_with_old_weights(model, plan))
    (whole,) = schedules_of(plan, ITERATIONS)
    for own, promised in zip(plan.placement, weight_copies(whole), strict=True):
        assert {ranks[rank]["held"] for rank in own} == {promised}


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_a_flush_lets_the_next_iterations_begin_with_the_newest_weights(processes, schedule):
    """Two iterations, a flush, and the last iteration."""
    plan = make_plan("llama", dp=1, pp=4, micro_batches=4, schedule=schedule, options={"iterations": 2})
    ranks = processes.run(4, run_rank, "llama", plan)
    assert_parity(ranks, plain_pytorch_with_old_weights("llama", plan, flush_every=2))


def test_dropout_is_that_of_the_same_iteration_and_micro_batch(processes):
    """With a learning rate of 0 weights are never old, so all schedules must draw the same numbers."""
    still = replace(NO_CLIPPING, learning_rate=0.0)
    plan = make_plan("gpt2-dropout", dp=2, pp=2, micro_batches=3)
    expected = [result.loss for result in processes.run(4, run_rank, "gpt2-dropout", plan, still)[0]["results"]]
    assert len(set(expected)) == ITERATIONS
    old = replace(plan, schedule="pipedream-2bw")
    assert [result.loss for result in processes.run(4, run_rank, "gpt2-dropout", old, still)[0]["results"]] == expected

    kept = processes.run(4, run_rank, "gpt2-dropout", old)
    again = processes.run(4, run_rank, "gpt2-dropout", replace(old, schedule_options={"recompute": "full"}))
    for a, b in zip(kept, again, strict=True):
        assert a["results"] == b["results"]
        for name, value in a["parameters"].items():
            assert (value == b["parameters"][name]).all(), name
