"""Tensor parallelism on real processes equals plain PyTorch on one process, with every other axis of a Plan."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist

from auto3d.cluster import place_ranks
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import Plan
from auto3d.runtime.messages.tensor_group import ProcessTensorGroup
from auto3d.runtime.process.world import connect, join, new_group
from auto3d.runtime.randomness import Randomness, SeededOperation
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.waiting import WaitTimeoutError, waiting_up_to
from tests.distributed.grid import kept_fractions_of
from tests.distributed.parity import ADAMW, CPU, SGD, assert_parity, make_plan, plain_pytorch, run_rank, with_split
from tests.distributed.test_uneven import make_plan as make_uneven_plan
from tests.models import captured
from tests.processes import ProcessPool
from tests.soak import soak


@pytest.fixture(scope="module")
def eight() -> Iterator[ProcessPool]:
    with ProcessPool(8) as pool:
        yield pool


def assert_equals_one_process(pool, model: str, plan: Plan) -> list[dict]:
    assert plan.split, "something is split"
    ranks = pool.run(plan.ranks, run_rank, model, plan, SGD)
    expected = plain_pytorch(model, micro_batch_size=2, optimizer=SGD, global_batch=plan.global_batch)
    assert_parity(ranks, expected)
    return ranks


@pytest.mark.parametrize(
    ("model", "dp", "tp", "pp"),
    [  # the sample of the grid has all of these degrees
        *soak(("gpt2", 1, 4, 1), ("gpt2", 1, 2, 1), ("gpt2", 1, 2, 2), ("gpt2", 2, 2, 1)),
        *soak(("llama", 1, 2, 1), ("llama", 1, 2, 2), ("llama", 2, 2, 1), ("llama", 1, 4, 1)),
    ],
)
def test_degrees(processes, model, dp, tp, pp):
    assert_equals_one_process(processes, model, make_plan(model, dp=dp, tp=tp, pp=pp))


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        ("t5", "interleaved-1f1b"),
        *soak(*product(("gpt2", "t5"), ("chimera", "zb-h1", "shifted-critical-path"))),  # all in the sample of the grid
        *soak(("t5", "gpipe"), ("gpt2", "gpipe"), ("gpt2", "interleaved-1f1b")),
    ],
)
def test_schedules(processes, model, schedule):
    stages = uniform(captured(model, 2).graph, 4) if schedule == "interleaved-1f1b" else None
    assert_equals_one_process(processes, model, make_plan(model, dp=1, tp=2, pp=2, schedule=schedule, stages=stages))


@pytest.mark.parametrize("model", ["gpt2", *soak("llama-tied")])
def test_recomputation_changes_no_bit(processes, model):
    plan = make_plan(model, dp=1, tp=2, pp=2)
    full = replace(plan, schedule_options={"recompute": "full"})
    half = kept_fractions_of(captured(model, 2).graph, full).plan(0.5)
    kept = assert_equals_one_process(processes, model, plan)
    for other in (full, half):
        again = processes.run(4, run_rank, model, other, SGD)
        for a, b in zip(kept, again, strict=True):
            for name, value in a["history"][-1]["gradients"].items():
                assert np.array_equal(value, b["history"][-1]["gradients"][name]), name


@pytest.mark.parametrize(("dp", "pp"), [(2, 1), *soak((1, 2))])
def test_sharded_optimizer(processes, dp, pp):
    """Each shard's ranks update a part of it each; bit by bit what they do without ZeRO-1."""
    plan = make_plan("gpt2", dp=dp, tp=2, pp=pp)
    ranks = processes.run(4, run_rank, "gpt2", plan, ADAMW)
    again = processes.run(4, run_rank, "gpt2", replace(plan, shard_optimizer=True), ADAMW)
    for a, b in zip(ranks, again, strict=True):
        for name, value in a["history"][-1]["parameters"].items():
            assert np.array_equal(value, b["history"][-1]["parameters"][name]), name


def test_ranks_of_a_group_need_not_be_neighbours(processes):
    plan = make_plan("gpt2", dp=1, tp=2, pp=2)
    assert_equals_one_process(processes, "gpt2", replace(plan, placement=((3, 0), (1, 2))))


@pytest.mark.parametrize("replicas", [[2, 1], *soak([1, 2])], ids=str)
def test_uneven_replicas(eight, replicas):
    plan = make_uneven_plan("gpt2", replicas, micro_batch_size=2, micro_batches=4)
    plan = replace(plan, tp=2, placement=place_ranks(dp=1, pp=2, tp=2, replicas=replicas))
    assert_equals_one_process(eight, "gpt2", with_split(plan, captured("gpt2", 2)))


@pytest.mark.soak  # the sample of the grid has all three dimensions
@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_three_dimensions(eight, schedule):
    assert_equals_one_process(eight, "gpt2", make_plan("gpt2", dp=2, tp=2, pp=2, schedule=schedule))


def test_shards_draw_numbers_of_their_own():
    randomness = Randomness(1, first_micro_batch=0, micro_batches=1, device=CPU)
    ones = torch.ones(64)

    def drawn(shard: int | None) -> list[float]:
        return SeededOperation(torch.dropout, 3, randomness, shard)(ones, 0.5, True).tolist()

    masks = [drawn(shard) for shard in (None, 0, 1, 2)]
    assert len(set(map(tuple, masks))) == 4
    assert masks == [drawn(shard) for shard in (None, 0, 1, 2)]


def test_dropout_is_the_same_again_and_when_it_is_recomputed(processes):
    plan = make_plan("gpt2-dropout", dp=1, tp=2, pp=2)
    first, again = (processes.run(4, run_rank, "gpt2-dropout", plan, SGD) for _ in range(2))
    full = replace(plan, schedule_options={"recompute": "full"})
    recomputed = processes.run(4, run_rank, "gpt2-dropout", full, SGD)
    for a, b, c in zip(first, again, recomputed, strict=True):
        for name, value in a["history"][-1]["parameters"].items():
            assert np.array_equal(value, b["history"][-1]["parameters"][name]), name
            assert np.array_equal(value, c["history"][-1]["parameters"][name]), name


@pytest.mark.soak  # the sample of the grid splits sequences, too
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_sequence_parallelism(processes, schedule):
    plan = make_plan("gpt2", dp=1, tp=2, pp=2, schedule=schedule, sequence_parallel=True)
    assert_equals_one_process(processes, "gpt2", plan)


# A rank that is late


def wait_alone(world) -> str:
    """Rank 0 begins an all-reduce that rank 1 does not; returns its error."""
    join(world, device=CPU, timeout_s=60)
    try:
        with waiting_up_to(1.0):
            group = new_group((0, 1), device=CPU)
            connect(group, device=CPU, what="all")
            tensor = ProcessTensorGroup(group, (0, 1), run_ahead=RunAhead(CPU))
            if world.rank == 0:
                tensor.all_reduce(torch.ones(3), "transformer_h_0_mlp")()
    except WaitTimeoutError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def test_a_wait_says_what_it_waited_for(processes):
    told, _ = processes.run(2, wait_alone)
    assert "waited 1 s for the all-reduce of transformer_h_0_mlp among ranks 0, 1" in told
