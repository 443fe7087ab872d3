"""A stage whose micro-batches take turns as two halves equals one that runs them whole, all shards in one process."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from auto3d.capture.export import InputSpec
from auto3d.capture.model import CapturedModel, capture
from auto3d.capture.shard import Shard
from auto3d.data import Batches
from auto3d.derived.halves import sub_pipelined
from auto3d.derived.model import Derived
from auto3d.derived.shards import tensor_parallel
from auto3d.partition.stage import cut
from auto3d.plan import StagePlan
from auto3d.runtime.messages.tensor_group import TensorParallelRank
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.build import build_stage
from auto3d.runtime.stage.program import ProgramOfStage
from auto3d.runtime.verify.lockstep import Lockstep
from auto3d.runtime.weights.materialize import materialize
from auto3d.share import Share
from tests.models import TRAINED, captured
from tests.soak import soak

CPU = torch.device("cpu")
SHARDS = 2


def state_of(model: Derived, shard: int, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = dict(model.program.exported.constants)
    for name, tensor in whole.items():
        split = model.placements[name].split
        mine = tensor.clone() if split is None else Shard(split, shard, model.share.tp).of(tensor)
        trained = name in model.program.graph.trained
        state[name] = nn.Parameter(mine, requires_grad=trained) if name in model.program.graph.parameters else mine
    return state


def train(
    model: Derived,
    whole: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    *,
    parts: int = 1,
    split_backward: bool = False,
    kept: float | None = None,
) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """(loss, gradients) of two micro-batches on each shard; ``kept`` is the share of operations not recomputed.

    The model has as many stages as ``parts``, all in this process.
    """
    count = len(model.whole.graph.nodes)
    bounds = [count * number // parts for number in range(parts + 1)]
    plans = []
    for first, last in pairwise(bounds):
        plan = StagePlan(operations=((first, last),))
        start = last - int((kept or 0) * (last - first))
        plans.append(replace(plan, kept=((start, last),)) if start < last else plan)
    local = model.stages(plans)
    stages = cut(model.program.graph, local)

    def one(group):
        state = state_of(model, group.shard, whole)
        randomness = Randomness(3, first_micro_batch=0, micro_batches=2, device=CPU)
        modules = [
            build_stage(
                [ProgramOfStage(stage, model.program, TensorParallelRank(model=model, group=group))],
                state,
                loss_weight=0.5,
                randomness=randomness,
                recompute=kept is not None,
                kept=each.kept,
                split_backward=split_backward,
            )
            for stage, each in zip(stages, local, strict=True)
        ]
        for micro_batch in range(2):
            values: dict[str, torch.Tensor] = {}
            for module in modules:
                values |= module.forward(
                    micro_batch, {t.value.name: values[t.value.name] for t in module.stage.received}, inputs
                )
        for micro_batch in range(2):
            gradients: dict[str, list[torch.Tensor]] = {}
            for module in reversed(modules):
                sent = {t.value.name for t in module.stage.sent}
                back = module.backward(micro_batch, {n: g for n, g in gradients.items() if n in sent})
                for name, gradient in back.items():
                    gradients.setdefault(name, []).insert(0, gradient)
        loss = modules[-1].losses[0] + modules[-1].losses[1]
        return loss, {name: tensor.grad for name, tensor in state.items() if tensor.requires_grad}

    return Lockstep(SHARDS).run(one)


def prepared(name: str, size: int = 4) -> tuple[CapturedModel, dict, dict]:
    model = captured(name, size)
    names = [*model.graph.parameters, *model.graph.buffers]
    whole = materialize(model.exported.build, names, seed=5)
    inputs = Batches(TRAINED[name][1], seed=5, global_batch=size, micro_batch_size=size).micro_batch(
        0, 0, tuple(model.exported.inputs)
    )
    return model, whole, inputs


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"kept": 0.0},
    {"kept": 0.5},
    {"split_backward": True},
    {"parts": 2},
    {"parts": 2, "kept": 0.5},
)


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [("gpt2-dropout", True), *soak(("t5-dropout", False), ("llama", False), ("swin", True), ("bert-dropout", False))],
)
def test_two_halves_equal_the_whole(name, sequence_parallel):
    """The loss to the bit, gradients up to the order in which the samples of a weight's gradient are added."""
    model, whole, inputs = prepared(name)
    plain = tensor_parallel(model, Share(tp=SHARDS, sequence_parallel=sequence_parallel))
    expected = train(plain, whole, inputs)
    for options in OPTIONS:
        results = train(sub_pipelined(plain), whole, inputs, **options)
        for (loss, gradients), (loss_of_whole, of_whole) in zip(results, expected, strict=True):
            assert torch.equal(loss, loss_of_whole), options
            for parameter, gradient in of_whole.items():
                bound = 1e-5 * float(gradient.abs().max()) + 1e-7
                assert float((gradients[parameter] - gradient).abs().max()) <= bound, (parameter, options)


class Integers(nn.Module):
    """Computes with small integers, so that every sum is exact: a tied weight, a mask, a residual, a bias, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 8)
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randint(-1, 2, parameter.shape))

    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            hidden = torch.relu(self.first(values)).masked_fill(mask.unsqueeze(-1) > 0, 0)
            values = values + nn.functional.dropout(self.second(hidden), 0.5)
        return torch.relu(values).sum()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_equal_to_the_bit_where_sums_are_exact(options):
    inputs = {"values": InputSpec(shape=(6, 8), dtype=torch.float32), "mask": InputSpec(shape=(6,), dtype=torch.int64)}
    model = capture(Integers, inputs, 4)
    plain = tensor_parallel(model, Share(tp=SHARDS))
    whole = materialize(model.exported.build, [*model.graph.parameters], seed=5)
    batch = {"values": torch.randint(-1, 2, (4, 6, 8)).float(), "mask": torch.randint(0, 2, (4, 6))}
    expected = train(plain, whole, batch)
    for (loss, gradients), (loss_of_whole, of_whole) in zip(
        train(sub_pipelined(plain), whole, batch, **options), expected, strict=True
    ):
        assert torch.equal(loss, loss_of_whole)
        assert of_whole
        for parameter, gradient in of_whole.items():
            assert gradient.count_nonzero()
            assert torch.equal(gradients[parameter], gradient), parameter
