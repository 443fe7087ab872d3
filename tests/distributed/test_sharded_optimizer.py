"""ZeRO-1 on real processes: training equals one process, and each rank holds the optimizer's state of its slices."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist

from auto3d.conversions import Collective
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.messages.gradient_sync import GradientSync
from auto3d.runtime.messages.slice_collectives import Begun, all_gather, all_reduce, reduce_scatter
from auto3d.runtime.process.world import join, leave, new_group
from auto3d.runtime.rank import build_rank, check_plan
from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.schedule import samples_at_once
from tests.distributed import asynchronous, parity
from tests.distributed.parity import ADAMW, CPU, SGD, run_rank
from tests.distributed.test_uneven import assert_equals_one_process, make_plan
from tests.models import TEXT, captured
from tests.soak import soak

ITERATIONS = 3


@pytest.mark.parametrize(
    ("model", "dp", "replicas", "schedule"),
    [
        ("gpt2", 1, [1, 3], "gpipe"),
        ("t5", 2, [1, 1], "interleaved-1f1b"),
        *soak(("gpt2", 2, [1, 1], "1f1b"), ("gpt2", 2, [1, 1], "chimera"), ("gpt2", 1, [1, 1], "gems")),
        ("gpt2", 1, [1, 1, 1], "1f1b"),  # no other rank to shard with, except for what is tied
    ],
    ids=str,
)
def test_training_is_that_of_one_process(processes, model, dp, replicas, schedule):
    plan = replace(make_plan(model, replicas, dp=dp, schedule=schedule), shard_optimizer=True)
    assert_equals_one_process(processes, model, plan)


PLANS = {
    "dp4": lambda: parity.make_plan("gpt2", dp=4, pp=1),
    "dp2 pp2, tied": lambda: parity.make_plan("gpt2", dp=2, pp=2),
    "chimera": lambda: parity.make_plan("gpt2", dp=2, pp=2, schedule="chimera"),
    "tp2 dp2": lambda: parity.make_plan("gpt2", dp=2, tp=2, pp=1),
    "sequence-parallel": lambda: parity.make_plan("gpt2", dp=2, tp=2, pp=1, sequence_parallel=True),
}


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        *((plan, ADAMW) for plan in ("dp2 pp2, tied", "sequence-parallel")),
        *soak(*((plan, ADAMW) for plan in ("dp4", "chimera", "tp2 dp2")), ("tp2 dp2", SGD), ("dp4", SGD)),
    ],
    ids=str,
)
def test_parameters_are_those_without_it(processes, plan, optimizer):
    made = PLANS[plan]()
    optimizer = replace(optimizer, exempt=("*.bias", "*.ln_*"))
    one, other = (
        processes.run(4, run_rank, "gpt2", replace(made, shard_optimizer=sharded), optimizer, None, None, ITERATIONS)
        for sharded in (False, True)
    )
    for rank, same in zip(one, other, strict=True):
        for name, value in rank["history"][-1]["parameters"].items():
            found = same["history"][-1]["parameters"][name]
            assert abs(value - found).max() <= 1e-6 * abs(value).max() + 1e-7, name


@pytest.mark.parametrize(("schedule", "model"), [("pipedream", "llama"), ("pipedream-2bw", "gpt2")])
def test_an_asynchronous_schedule_keeps_old_versions_of_flat_weights(processes, schedule, model):
    plan = parity.make_plan(model, dp=2, pp=2, micro_batches=3, schedule=schedule, shard_optimizer=True)
    ranks = processes.run(4, asynchronous.run_rank, model, plan)
    asynchronous.assert_parity(ranks, asynchronous.plain_pytorch_with_old_weights(model, plan))


def held(world, plan: Plan, optimizer: OptimizerSettings) -> tuple[int, int, int]:
    """Number of elements of this rank's optimizer state, of its parameters, and of the padding of its slices."""
    settings = TrainingSettings(iterations=1, optimizer=optimizer, timeout_s=60)
    join(world, device=CPU, timeout_s=60)
    try:
        rank = build_rank(captured("gpt2", samples_at_once(plan)), plan, settings, TEXT, world)
        list(rank.executor.run(rank.programs[0], 0))
        ((optimizer, _),) = rank.updaters()
        states = [state["momentum_buffer"] for state in optimizer.state.values()]
        padding = sum(len(s.weights()) - sum(p.numel() for p in s.parameters.values()) for s in rank.slices)
        elements = sum(p.numel() for p in rank.parameters.values() if p.requires_grad)
        named = sum(part.tensor.numel() for name, part in rank.state().items() if name.startswith("optimizer."))
        assert named <= sum(state.numel() for state in states)
        return sum(state.numel() for state in states), elements, padding
    finally:
        leave()


def test_each_rank_holds_a_quarter_of_the_state(processes):
    plan = replace(parity.make_plan("gpt2", dp=4, pp=1), shard_optimizer=True)
    for state, elements, padding in processes.run(4, held, plan, SGD):
        assert state == (elements + padding) / 4
        assert padding < 0.02 * elements


def sent_on_loopback() -> int:
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def traffic(world, size: int) -> dict[str, int]:
    """Bytes that all ranks send in each collective on ``size`` bytes, as the kernel counts them; the least of three."""
    join(world, device=CPU, timeout_s=60)
    try:
        ranks = range(world.size)
        group = new_group(ranks, device=CPU)
        buffer = torch.ones(size // 4)
        collectives = {
            "all-reduce": lambda: all_reduce(buffer, group),
            "reduce-scatter": lambda: reduce_scatter(buffer, group, ranks),
            "all-gather": lambda: all_gather(buffer, group, ranks),
        }
        sent = {}
        for name, begin in collectives.items():
            counts = []
            for _ in range(3):  # other processes only add to the count
                dist.barrier()
                before = sent_on_loopback()
                dist.barrier()
                _wait(begin())
                dist.barrier()
                sleep(0.02)
                counts.append(sent_on_loopback() - before)
            sent[name] = min(counts)
        return sent
    finally:
        leave()


def _wait(begun: Begun) -> None:
    for work in begun.works:
        work.wait()
    begun.finish()


def test_a_reduce_scatter_sends_half_of_an_all_reduce(processes):
    size = 2**24
    for sent in processes.run(4, traffic, size):
        assert sent["all-reduce"] == pytest.approx(2 * 3 * size, rel=0.05)
        assert sent["reduce-scatter"] == pytest.approx(3 * size, rel=0.05)
        assert sent["all-gather"] == pytest.approx(3 * size, rel=0.05)


def collectives(world, plan: Plan) -> list[str]:
    """The collectives of gradients and weights in an iteration, in order, and "gather" where gathers begin."""
    settings = TrainingSettings(iterations=1, optimizer=SGD, timeout_s=60)
    join(world, device=CPU, timeout_s=60)
    names = ("_begun", "begin_gathers")
    real = {name: getattr(GradientSync, name) for name in names}
    used: list[str] = []

    def noting(self: GradientSync, collective: Collective, *others: Any) -> Any:
        used.append(f"{collective}")
        return real["_begun"](self, collective, *others)

    def noting_gather(self: GradientSync, stages: Iterable[int]) -> None:
        used.append("gather")
        real["begin_gathers"](self, stages)

    try:
        rank = build_rank(captured("gpt2", samples_at_once(plan)), plan, settings, TEXT, world)
        GradientSync._begun, GradientSync.begin_gathers = noting, noting_gather  # type: ignore[method-assign]
        list(rank.executor.run(rank.programs[0], 0))
        return used
    finally:
        for name in names:
            setattr(GradientSync, name, real[name])
        leave()


def test_weights_are_gathered_once_after_all_updates(processes):
    plan = replace(make_plan("gpt2", [1, 1], dp=2, schedule="chimera"), shard_optimizer=True)
    for used in processes.run(4, collectives, plan):
        (gather,) = (number for number, each in enumerate(used) if each == "gather")
        assert set(used[:gather]) == {"reduce-scatter"}
        assert set(used[gather + 1 :]) == {"all-gather"}


@pytest.mark.parametrize(
    ("optimizer", "degrees", "problem"),
    [
        (replace(ADAMW, optimizer="adafactor"), {"dp": 2, "pp": 1, "shard_optimizer": True}, "shard_optimizer"),
        (replace(ADAMW, optimizer="torch.optim.Adafactor"), {"dp": 1, "tp": 2, "pp": 1}, "tp = 2 splits"),
    ],
    ids=["sharded", "tensor-parallel"],
)
def test_an_optimizer_that_mixes_elements_is_refused(optimizer, degrees, problem):
    plan = parity.make_plan("gpt2", **degrees)
    settings = TrainingSettings(iterations=2, optimizer=optimizer)
    with pytest.raises(InputError, match=problem) as refusal:
        check_plan(captured("gpt2", samples_at_once(plan)), plan, settings)
    assert "\n" not in str(refusal.value)
