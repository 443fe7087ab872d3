"""ZeRO-1 on real processes: the training is that of one process, and each state is on one rank of a stage's."""

from dataclasses import replace

import pytest
import torch

from auto3d.plan import Plan
from auto3d.runtime.rank import build_rank
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.world import join, leave
from auto3d.schedule import samples_at_once
from tests.distributed.parity import ADAMW, SGD, run_rank
from tests.distributed.test_uneven import assert_equals_one_process, make_plan
from tests.models import TEXT, captured


@pytest.mark.parametrize(
    ("model", "dp", "replicas", "schedule"),
    [
        ("gpt2", 2, [1, 1], "1f1b"),
        ("gpt2", 1, [1, 3], "gpipe"),
        ("t5", 2, [1, 1], "interleaved-1f1b"),
        ("gpt2", 2, [1, 1], "chimera"),
        ("gpt2", 1, [1, 1, 1], "1f1b"),  # nobody to share with
    ],
    ids=str,
)
def test_training_is_that_of_one_process(processes, model, dp, replicas, schedule):
    plan = replace(make_plan(model, replicas, dp=dp, schedule=schedule), shard_optimizer=True)
    assert_equals_one_process(processes, model, plan)


def test_adamw_updates_as_without_it(processes):
    """To the bit: the same gradients, and the same arithmetic on one of the ranks."""
    plan = make_plan("gpt2", [2, 2])
    one = processes.run(4, run_rank, "gpt2", plan, ADAMW)
    other = processes.run(4, run_rank, "gpt2", replace(plan, shard_optimizer=True), ADAMW)
    for rank, same in zip(one, other, strict=True):
        for name, value in rank["history"][-1]["parameters"].items():
            assert (value == same["history"][-1]["parameters"][name]).all(), name


def sizes(world, plan: Plan) -> tuple[int, int]:
    """Elements of this rank's optimizer state, and of its parameters."""
    settings = TrainingSettings(iterations=1, optimizer=SGD, device="cpu", threads_per_rank=1, timeout_s=60)
    join(world, device=torch.device("cpu"), timeout_s=60)
    try:
        rank = build_rank(captured("gpt2", samples_at_once(plan)), plan, settings, TEXT, world)
        list(rank.executor.run(rank.programs[0], 0))
        (optimizer, _) = next(iter(rank.executor._optimizers.values()))
        states = getattr(optimizer, "optim", optimizer).state.values()
        held = sum(state["momentum_buffer"].numel() for state in states)
        return held, sum(p.numel() for p in rank.parameters.values() if p.requires_grad)
    finally:
        leave()


def test_the_ranks_of_a_stage_hold_each_state_once(processes):
    plan = make_plan("gpt2", [1, 3])
    whole = processes.run(4, sizes, plan)
    assert all(held == parameters for held, parameters in whole)
    shared = processes.run(4, sizes, replace(plan, shard_optimizer=True))
    assert shared[0] == whole[0]
    assert sum(held for held, _ in shared[1:]) == shared[1][1]
    assert max(held for held, _ in shared[1:]) < 0.6 * shared[1][1]
