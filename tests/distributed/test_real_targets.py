"""Each real target of a global batch counts equally, as on one process that sees the whole batch at once."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from auto3d.capture.skeleton import seed_all
from auto3d.data import BatchSlice, DataSettings, Reading
from auto3d.errors import InputError
from auto3d.partition.methods.uniform import uniform
from auto3d.partition.stage import cut
from auto3d.plan import SUB_PIPELINED, Plan
from auto3d.runtime.optimizer.build import build_optimizer
from auto3d.runtime.process.world import World, join, leave
from auto3d.runtime.rank import Rank, build_rank
from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.schedule import samples_at_once
from tests.distributed import test_uneven
from tests.distributed.parity import CLIP_NORM, CPU, SGD, assert_close, make_plan
from tests.models import TRAINED, captured
from tests.soak import soak

IGNORED = -100
ITERATIONS = 2


@dataclass(frozen=True)
class UnevenLabels:
    """``data`` of which the input ``where`` has labels that are ignored: ``real_targets`` says how many are not."""

    data: DataSettings
    where: str = "labels"
    may_ignore_targets: bool = True
    has_targets: bool = True  # False: all labels are ignored
    incomplete: None = None
    lengths: None = None
    read_once: bool = False
    is_by_position: bool = True
    is_read_anew: bool = False

    def begins_epoch(self, iteration: int) -> bool:
        return False

    def reads(self, names: Collection[str]) -> bool:
        return self.data.reads(names)

    def micro_batches(self, part: BatchSlice) -> "UnevenBatches":
        return UnevenBatches(self, part)


class UnevenBatches:
    def __init__(self, labels: UnevenLabels, part: BatchSlice) -> None:
        self._labels, self._part = labels, part
        self._batches = labels.data.micro_batches(part)

    def read(self, iteration: int, index: int, names: Collection[str]) -> Reading:
        reading = self._batches.read(iteration, index, names)
        made = reading.inputs
        if self._labels.where in made:
            labels = made[self._labels.where] = made[self._labels.where].clone()
            first = iteration * self._part.global_batch + index * self._part.micro_batch_size
            first += self._part.replica * len(labels)
            for row, label in enumerate(labels):
                label[real_targets(first + row) if self._labels.has_targets else 0 :] = IGNORED
        return reading

    def fingerprints(self, iteration: int, index: int, replica: int | None = None) -> np.ndarray | None:
        return self._batches.fingerprints(iteration, index, replica)


def real_targets(sample: int) -> int:
    """How many of the first labels of a sample count: none for a sixth of the samples, two of which are neighbours."""
    return 0 if sample % 12 in (2, 3) else 3 + 7 * sample % 29


def reference(model: str, plan: Plan, optimizer: OptimizerSettings) -> list[dict]:
    return _reference(model, plan.global_batch, plan.seed, optimizer)


@cache
def _reference(model: str, global_batch: int, seed: int, optimizer: OptimizerSettings) -> list[dict]:
    """Plain PyTorch: the sum of per-token losses over the number of real tokens of the global batch, run at once."""
    build, data = TRAINED[model][0], uneven(model)
    seed_all(seed)
    module: nn.Module = build().train()
    step, rate = build_optimizer(list(module.parameters()), optimizer, iterations=ITERATIONS)
    batches = data.micro_batches(BatchSlice(seed=seed, global_batch=global_batch, micro_batch_size=global_batch))
    history = []
    for iteration in range(ITERATIONS):
        module.zero_grad()
        inputs = batches.read(iteration, 0, tuple(data.data.inputs)).inputs
        outputs, labels = module(**inputs), inputs["labels"]
        logits = outputs["logits"]
        if model.startswith(("gpt2", "llama")):
            logits, labels = logits[:, :-1], labels[:, 1:]
        each = per_token(logits, labels)
        if model == "two-losses":
            each = each + 0.5 * per_token(outputs["early"], labels)
        loss = each.sum() / (labels != IGNORED).sum()
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(module.parameters(), optimizer.clip_norm or float("inf")))
        step.step()
        rate.step()
        history.append(
            {
                "loss": loss.item(),
                "norm": norm,
                "gradients": {n: p.grad.numpy().copy() for n, p in module.named_parameters() if p.grad is not None},
                "parameters": {n: p.detach().numpy().copy() for n, p in module.named_parameters()},
            }
        )
    return history


def per_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")


def run_rank(
    world: World,
    model: str,
    plan: Plan,
    data: UnevenLabels,
    optimizer: OptimizerSettings,
    loss_scale: float | None = None,
    overflow_in: int | None = None,
) -> dict[str, Any]:
    """Train as one rank; the gradient of rank 0 overflows in the iteration ``overflow_in``."""
    settings = TrainingSettings(iterations=ITERATIONS, optimizer=optimizer, timeout_s=60, loss_scale=loss_scale)
    join(world, device=CPU, timeout_s=60)
    try:
        rank = build_rank(captured(model, samples_at_once(plan)), plan, settings, data, world)
        history = []
        for iteration, program in enumerate(rank.programs):
            if iteration == overflow_in and world.rank == 0:
                overflow_once(rank)
            (result,) = rank.executor.run(program, iteration)
            history.append({"result": result, "numbers": rank.numbers(), "rates": rates(rank), **tensors(rank)})
        return {"history": history, "shards": rank.shards}
    finally:
        leave()


def tensors(rank: Rank) -> dict[str, dict[str, np.ndarray]]:
    """Copies of the rank's parameters and their gradients; under ZeRO-1 it has sums of a slice of them only."""
    summed = {} if rank.slices else rank.parameters
    return {
        "gradients": {n: p.grad.numpy().copy() for n, p in summed.items() if p.grad is not None},
        "parameters": {n: p.detach().numpy().copy() for n, p in rank.parameters.items()},
    }


def rates(rank: Rank) -> list[float]:
    return [rate.get_last_lr()[0] for _, rate in rank.updaters()]


def overflow_once(rank: Rank) -> None:
    """Have the next gradient of one of the rank's parameters overflow."""
    parameter = next(iter(rank.parameters.values()))
    hook = parameter.register_hook(lambda gradient: (hook.remove(), gradient * float("inf"))[1])


def assert_equal(ranks: list[dict], expected: list[dict]) -> None:
    for iteration, wanted in enumerate(expected):
        for number, rank in enumerate(ranks):
            got, where = rank["history"][iteration], f"iteration {iteration}, rank {number}"
            assert_close(np.float64(got["result"].loss), np.float64(wanted["loss"]), f"loss, {where}")
            assert_close(np.float64(got["result"].grad_norm), np.float64(wanted["norm"]), f"norm, {where}")
            assert got["parameters"]
            for kind in ("gradients", "parameters"):
                for name, value in got[kind].items():
                    assert_close(value, wanted[kind][name], f"{kind} of {name}, {where}", rank["shards"].get(name))


def uneven(model: str) -> UnevenLabels:
    return UnevenLabels(TRAINED[model][1])


CASES: Mapping[str, tuple[str, Any]] = {
    "dp2 pp2": ("gpt2", {"dp": 2, "pp": 2, "micro_batches": 3}),
    "chimera": ("gpt2", {"dp": 1, "pp": 4, "micro_batches": 4, "schedule": "chimera"}),
    "chimera in parts": (
        "bert",
        {"dp": 1, "pp": 2, "micro_batches": 4, "micro_batch_size": 4, "schedule": "chimera"}
        | {"options": {"scale": "halving"}},
    ),
    "gems": ("gpt2", {"dp": 1, "pp": 2, "micro_batches": 4, "schedule": "gems"}),
    "zero bubble": ("llama", {"dp": 1, "pp": 2, "micro_batches": 4, "schedule": "zb-h1"}),
    "recomputed": ("llama", {"dp": 1, "pp": 2, "micro_batches": 4, "options": {"recompute": "full"}}),
    "tied, gpipe, ZeRO-1": (
        "gpt2",
        {"dp": 2, "pp": 2, "micro_batches": 2, "schedule": "gpipe", "shard_optimizer": True},
    ),
    "t5": ("t5", {"dp": 2, "pp": 2, "micro_batches": 2}),
    "tp2 pp2": ("gpt2-4-heads", {"dp": 1, "tp": 2, "pp": 2, "micro_batches": 4}),
    "sequences in shards": (
        "bert-4-heads",
        {"dp": 2, "tp": 2, "pp": 1, "micro_batches": 2, "sequence_parallel": True},
    ),
    "slices of the sequence": (
        "gpt2",
        {"dp": 2, "pp": 2, "micro_batches": 3, "schedule": "seq1f1b", "options": {"slices": 4}},
    ),
    "slices in shards": (
        "gpt2-4-heads",
        {"dp": 1, "tp": 2, "pp": 2, "micro_batches": 3, "schedule": "seq1f1b", "options": {"slices": 4}},
    ),
    "two losses": ("two-losses", {"dp": 2, "pp": 2, "micro_batches": 3}),
    "two losses in slices": (
        "two-losses",
        {"dp": 1, "pp": 2, "micro_batches": 3, "schedule": "seq1f1b", "options": {"slices": 2}},
    ),
    "halves": (
        "gpt2-4-heads",
        {"dp": 1, "tp": 2, "pp": 2, "micro_batches": 4, "tensor_overlap": SUB_PIPELINED},
    ),
}


# Their updates wait for sums only because targets are ignored.
UNCLIPPED = (
    "chimera",
    "t5",
    "halves",
    "two losses",
    "two losses in slices",
    "slices of the sequence",
    "slices in shards",
)


ALIKE = ("gems", "recomputed", "t5", "tp2 pp2")  # the suite has other pipes, options and models; "halves" is tp2 pp2


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in ALIKE), *soak(*ALIKE)])
def test_equals_one_process_that_sees_the_whole_batch(processes, name):
    model, sizes = CASES[name]
    optimizer = replace(SGD, clip_norm=0.0 if name in UNCLIPPED else CLIP_NORM)
    plan, data = make_plan(model, **sizes), uneven(model)
    ranks = processes.run(plan.ranks, run_rank, model, plan, data, optimizer)
    assert_equal(ranks, reference(model, plan, optimizer))


def test_a_count_comes_from_a_stage_before_the_last():
    """The case of two losses."""
    graph = captured("two-losses", 2).graph
    first = cut(graph, uniform(graph, 2))[0]
    assert "cross_entropy_loss" in first.nodes
    assert not first.has_loss


@pytest.mark.parametrize(
    ("replicas", "schedule"), [([2, 1], "1f1b"), ([1, 2], "seq1f1b"), *soak(([1, 2], "1f1b"))], ids=str
)
def test_replicas_count_their_slices(processes, replicas, schedule):
    plan = test_uneven.make_plan("gpt2", replicas, micro_batch_size=4, micro_batches=3, schedule=schedule)
    ranks = processes.run(plan.ranks, run_rank, "gpt2", plan, uneven("gpt2"), SGD)
    assert_equal(ranks, reference("gpt2", plan, SGD))


def test_a_loss_scale_changes_nothing(processes):
    plan, data = make_plan("gpt2", dp=2, pp=2, micro_batches=3), uneven("gpt2")
    ranks = processes.run(plan.ranks, run_rank, "gpt2", plan, data, SGD, 1024.0)
    assert_equal(ranks, reference("gpt2", plan, SGD))
    for rank in ranks:
        numbers = {"loss_scale": 1024.0, "good_iterations": 2.0, "skipped_iterations": 0.0}
        assert rank["history"][-1]["numbers"] == numbers


@pytest.mark.parametrize("clip", [CLIP_NORM, 0.0], ids=["clipped", "unclipped"])
def test_an_overflow_skips_the_update_of_all_ranks(processes, clip):
    plan = make_plan("gpt2", dp=2, pp=2, micro_batches=2, schedule="gpipe", shard_optimizer=True)
    optimizer = replace(SGD, clip_norm=clip)
    ranks = processes.run(plan.ranks, run_rank, "gpt2", plan, uneven("gpt2"), optimizer, 1024.0, 0)
    seed_all(plan.seed)
    initial = dict(TRAINED["gpt2"][0]().named_parameters())
    for rank in ranks:
        skipped, good = rank["history"]
        assert (skipped["result"].skipped, good["result"].skipped) == (True, False)
        assert np.isfinite(skipped["result"].loss)
        assert skipped["result"].grad_norm is None
        for name, value in skipped["parameters"].items():
            assert np.array_equal(value, initial[name].detach().numpy()), name
        assert set(skipped["rates"]) == {0.0}, "the rate of the first iteration of the warm-up stays"
        assert set(good["rates"]) == {optimizer.learning_rate}
        assert good["numbers"] == {"loss_scale": 512.0, "good_iterations": 1.0, "skipped_iterations": 1.0}
        assert np.isfinite(good["result"].grad_norm)


def refusal(
    world: World, model: str, plan: Plan, data: UnevenLabels, optimizer: OptimizerSettings
) -> tuple[str, list[bool]]:
    """(the error of one iteration, which of this rank's parameters have changed before it)"""
    settings = TrainingSettings(iterations=1, optimizer=optimizer, timeout_s=60)
    join(world, device=CPU, timeout_s=60)
    try:
        rank = build_rank(captured(model, samples_at_once(plan)), plan, settings, data, world)
        before = {name: parameter.detach().clone() for name, parameter in rank.parameters.items()}
        with pytest.raises(InputError) as error:
            list(rank.executor.run(rank.programs[0], 0))
        return str(error.value), [not torch.equal(before[n], p) for n, p in rank.parameters.items()]
    finally:
        leave()


CONSTANT_RATE = replace(SGD, warmup_iterations=0)


def test_terms_that_need_different_weights_are_refused_before_the_update(processes):
    plan = make_plan("bert-pretraining", dp=2, pp=2, micro_batches=2)
    answers = processes.run(plan.ranks, refusal, "bert-pretraining", plan, uneven("bert-pretraining"), CONSTANT_RATE)
    assert len({line for line, _ in answers}) == 1
    line, changed = answers[0]
    assert "cross_entropy_loss_1 100.00%" in line
    assert not any(changed)


def test_labels_that_the_data_does_not_announce_are_no_silent_error(processes):
    """With clipping, the update knows the fraction; without, it did not wait for it."""
    plan, data = make_plan("gpt2", dp=2, pp=2, micro_batches=3), replace(uneven("gpt2"), may_ignore_targets=False)
    assert_equal(processes.run(plan.ranks, run_rank, "gpt2", plan, data, SGD), reference("gpt2", plan, SGD))
    unclipped = replace(CONSTANT_RATE, clip_norm=0.0)
    for line, _ in processes.run(plan.ranks, refusal, "gpt2", plan, data, unclipped):
        assert "iteration 1: the data ignores targets" in line


def test_a_global_batch_without_targets_is_refused(processes):
    plan = make_plan("gpt2", dp=1, pp=2, micro_batches=2)
    data = replace(uneven("gpt2"), has_targets=False)
    for line, changed in processes.run(plan.ranks, refusal, "gpt2", plan, data, CONSTANT_RATE):
        assert "all targets of the global batch are ignored" in line
        assert not any(changed)
