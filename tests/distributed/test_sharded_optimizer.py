"""ZeRO-1 on real processes: training equals one process, and one rank of each stage holds each optimizer state."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from auto3d.plan import Plan
from auto3d.runtime import sharded_optimizer
from auto3d.runtime.optimizer import build_optimizer, local_optimizer, make_state, update
from auto3d.runtime.rank import build_rank
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.world import join, leave, new_group
from auto3d.schedule import samples_at_once
from tests.distributed.parity import ADAMW, CPU, SGD, run_rank
from tests.distributed.test_uneven import assert_equals_one_process, make_plan
from tests.models import TEXT, captured


@pytest.mark.parametrize(
    ("model", "dp", "replicas", "schedule"),
    [
        ("gpt2", 2, [1, 1], "1f1b"),
        ("gpt2", 1, [1, 3], "gpipe"),
        ("t5", 2, [1, 1], "interleaved-1f1b"),
        ("gpt2", 2, [1, 1], "chimera"),
        ("gpt2", 1, [1, 1, 1], "1f1b"),  # no other rank to shard with
    ],
    ids=str,
)
def test_training_is_that_of_one_process(processes, model, dp, replicas, schedule):
    plan = replace(make_plan(model, replicas, dp=dp, schedule=schedule), shard_optimizer=True)
    assert_equals_one_process(processes, model, plan)


def test_adamw_updates_as_without_it(processes):
    """To the bit: one of the ranks does the same arithmetic with the same gradients."""
    plan = make_plan("gpt2", [2, 2])
    one = processes.run(4, run_rank, "gpt2", plan, ADAMW)
    other = processes.run(4, run_rank, "gpt2", replace(plan, shard_optimizer=True), ADAMW)
    for rank, same in zip(one, other, strict=True):
        for name, value in rank["history"][-1]["parameters"].items():
            assert (value == same["history"][-1]["parameters"][name]).all(), name


def sizes(world, plan: Plan) -> tuple[int, int]:
    """Number of elements of this rank's optimizer state, and of its parameters."""
    settings = TrainingSettings(iterations=1, optimizer=SGD, device="cpu", threads_per_rank=1, timeout_s=60)
    join(world, device=CPU, timeout_s=60)
    try:
        rank = build_rank(captured("gpt2", samples_at_once(plan)), plan, settings, TEXT, world)
        list(rank.executor.run(rank.programs[0], 0))
        (optimizer, _) = next(iter(rank.executor._optimizers.values()))
        states = local_optimizer(optimizer).state.values()
        held = sum(state["momentum_buffer"].numel() for state in states)
        return held, sum(p.numel() for p in rank.parameters.values() if p.requires_grad)
    finally:
        leave()


def test_the_ranks_of_a_stage_hold_each_state_once(processes):
    plan = make_plan("gpt2", [1, 3])
    whole = processes.run(4, sizes, plan)
    assert all(held == parameters for held, parameters in whole)
    sharded = processes.run(4, sizes, replace(plan, shard_optimizer=True))
    assert sharded[0] == whole[0]
    assert sum(held for held, _ in sharded[1:]) == sharded[1][1]
    assert max(held for held, _ in sharded[1:]) < 0.6 * sharded[1][1]


def updated(world, sharded: bool, parameters: int) -> tuple[list[torch.Tensor], int]:
    """Parameters of several types and layouts after two updates, and how many messages these updates took."""
    join(world, device=CPU, timeout_s=60)
    broadcast, messages = dist.broadcast, []

    def counting(*arguments, **options):
        messages.append(arguments)
        return broadcast(*arguments, **options)

    random = torch.Generator().manual_seed(0)
    shapes = [(40, 30), (30,), (7, 5), (7,), (3,)]
    made = [torch.randn(shape, generator=random) for shape in shapes]
    made += [torch.randn(20, 30, generator=random).t(), torch.randn(9, generator=random).double()]
    parameters = [nn.Parameter(tensor) for tensor in made[:parameters]]
    before = sharded_optimizer.BUCKET_BYTES
    try:
        sharded_optimizer.BUCKET_BYTES = (
            400  # smaller than the largest parameter, larger than several of the others together
        )
        dist.broadcast = counting
        group = new_group(range(world.size), 60, device=CPU)
        run_ahead = RunAhead(CPU, 60)
        optimizer, _ = build_optimizer(parameters, ADAMW, iterations=2, shard_over=group if sharded else None)
        make_state(optimizer)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=random).to(parameter.dtype)
            update(optimizer, run_ahead=run_ahead, timeout_s=60)
        return [parameter.detach() for parameter in parameters], len(messages)
    finally:
        sharded_optimizer.BUCKET_BYTES, dist.broadcast = before, broadcast
        leave()


@pytest.mark.parametrize("parameters", [7, 2], ids=["several for each rank", "none for one rank"])
def test_shards_of_any_type_and_layout_travel_in_few_messages(processes, parameters):
    right, _ = processes.run(1, updated, False, parameters)[0]
    for found, messages in processes.run(3, updated, True, parameters):
        for tensor, same in zip(found, right, strict=True):
            assert torch.equal(tensor, same)
            assert tensor.stride() == same.stride()
        assert messages == 2 * min(parameters, 5), "small parameters of one type share a message"


def broadcasts_before_the_first_iteration(world, plan: Plan) -> set[tuple[int, ...]]:
    """The groups in which weights were broadcast."""
    settings = TrainingSettings(iterations=1, optimizer=SGD, device="cpu", threads_per_rank=1, timeout_s=60)
    join(world, device=CPU, timeout_s=60)
    broadcast, used = dist.broadcast, set()

    def noting(tensor, source, group=None, **options):
        used.add(tuple(dist.get_process_group_ranks(group)))
        return broadcast(tensor, source, group=group, **options)

    try:
        dist.broadcast = noting
        rank = build_rank(captured("gpt2", samples_at_once(plan)), plan, settings, TEXT, world)
        connected = set(used)
        used.clear()
        list(rank.executor.run(rank.programs[0], 0))
        assert used <= connected
        return connected
    finally:
        dist.broadcast = broadcast
        leave()


def test_the_group_is_connected_before_the_first_message(processes):
    plan = replace(make_plan("gpt2", [1, 3]), shard_optimizer=True)
    assert processes.run(4, broadcasts_before_the_first_iteration, plan) == [{(0,)}, *[{(1, 2, 3)}] * 3]
