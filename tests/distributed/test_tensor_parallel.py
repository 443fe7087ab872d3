"""Tensor parallelism on real processes equals plain PyTorch on one process, with every other axis of a Plan."""

import pytest

from tests.distributed.parity import SGD, assert_parity, make_plan, plain_pytorch, run_rank


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize(("dp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_degrees(processes, model, dp, pp):
    plan = make_plan(model, dp=dp, pp=pp, tp=2)
    assert plan.split
    ranks = processes.run(plan.ranks, run_rank, model, plan, SGD)
    assert_parity(ranks, plain_pytorch(model, micro_batch_size=2, optimizer=SGD))
