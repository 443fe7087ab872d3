"""Sub-pipelined tensor parallelism on real processes equals one process, and plain tensor parallelism with dropout."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from auto3d.plan import NO_OVERLAP, SUB_PIPELINED, Plan
from auto3d.runtime.replicas import capture_slices
from auto3d.schedule import samples_at_once
from tests.distributed.grid import kept_fractions_of
from tests.distributed.parity import ADAMW, SGD, assert_close, assert_parity, make_plan, plain_pytorch, run_rank
from tests.models import captured
from tests.soak import soak

RECOMPUTED = [("gpt2", 0.5, 2)]  # the sample of the grid has the others
EVERY = product(("gpt2", "llama"), ("none", "full", 0.5), (1, 2))  # models, recomputation, stages
SCHEDULE = "shifted-critical-path"  # the sample of the grid has the others


def plan_of(model: str, *, recompute: str | float = "none", overlap: str = SUB_PIPELINED, pp: int, **options) -> Plan:
    """A plan with tp = 2; a number for ``recompute`` is the kept fraction of the first stage."""
    word = {} if recompute == "none" else {"options": {"recompute": "full"}}
    plan = replace(make_plan(model, dp=1, pp=pp, tp=2, **word, **options), tensor_overlap=overlap)
    whole = captured(model, samples_at_once(plan))
    if isinstance(recompute, float):
        plan = kept_fractions_of(whole.graph, plan).plan(recompute)
    capture_slices(whole, plan)
    return plan


@pytest.mark.parametrize(
    ("model", "recompute", "pp"), [*RECOMPUTED, *soak(*(case for case in EVERY if case not in RECOMPUTED))]
)
def test_recomputation(processes, model, recompute, pp):
    plan = plan_of(model, recompute=recompute, pp=pp)
    ranks = processes.run(plan.ranks, run_rank, model, plan, SGD)
    assert_parity(ranks, plain_pytorch(model, micro_batch_size=2, optimizer=SGD))


@pytest.mark.parametrize("schedule", [SCHEDULE, *soak("zb-h1", "chimera")])
def test_schedules(processes, schedule):
    plan = plan_of("gpt2", pp=2, schedule=schedule, micro_batches=4)
    ranks = processes.run(plan.ranks, run_rank, "gpt2", plan, ADAMW)
    assert_parity(ranks, plain_pytorch("gpt2", micro_batch_size=2, optimizer=ADAMW))


def test_dropout_is_that_of_plain_tensor_parallelism(processes):
    """One process draws other numbers for attention, whose heads are split; both kinds of tensor parallelism do not."""
    plans = [plan_of("t5-dropout", pp=2, overlap=overlap) for overlap in (NO_OVERLAP, SUB_PIPELINED)]  # before a fork
    plain, halved = (processes.run(4, run_rank, "t5-dropout", plan, SGD) for plan in plans)
    for of_plain, of_halved in zip(plain, halved, strict=True):
        for expected, got in zip(of_plain["history"], of_halved["history"], strict=True):
            assert_close(np.float64(got["result"].loss), np.float64(expected["result"].loss), "loss")
            for name, gradient in expected["gradients"].items():
                assert_close(got["gradients"][name], gradient, name)
