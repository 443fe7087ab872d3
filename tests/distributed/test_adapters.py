"""peft's LoRA on an unmodified model: parity with one process, no gradient or state of frozen weights, and resuming."""

from dataclasses import replace
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

from auto3d.plan import Plan
from auto3d.runtime.checkpoint.format import Checkpoints
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.training import Training
from tests.distributed.parity import ADAMW, assert_parity, make_plan, plain_pytorch, run_rank
from tests.models import TOKENS, TRAINED, captured, gpt2
from tests.soak import soak

LORA = "gpt2-lora"
OPTIMIZER = replace(ADAMW, clip_norm=1e-3)  # below all norms, so that every iteration clips


def adapted() -> nn.Module:
    """Both matrices of an adapter are drawn at random: else half of its gradients would be zero."""
    settings = LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, init_lora_weights=False)
    return get_peft_model(gpt2(), settings)


@pytest.fixture
def lora():
    TRAINED[LORA] = (adapted, TOKENS)
    yield
    del TRAINED[LORA]


def train(world, plan: Plan, folder: Path, last: int) -> dict:
    settings = TrainingSettings(iterations=6, optimizer=OPTIMIZER, timeout_s=60)
    checkpoints = Checkpoints(folder=folder, every=1, keep=9)
    training = Training(captured(LORA, 2), plan, settings, TRAINED[LORA][1], world, checkpoints=checkpoints)
    for number, _ in training.iterations():
        if number == last:
            break
    rank = training.rank
    trained = {name for name, parameter in rank.parameters.items() if parameter.requires_grad}
    state = rank.state()
    return {
        "first": training.first,
        "frozen": len(rank.parameters) - len(trained),
        "loss": training.result().loss,
        "with_gradient": {n for n, p in rank.parameters.items() if p.grad is not None} == trained,
        "state_only_of_trained": {
            name.removeprefix("optimizer.").rpartition(".")[0] for name in state if name.startswith("optimizer.")
        }
        <= trained,
    }


@pytest.mark.parametrize("shard_optimizer", [*soak(False), True])
def test_equals_one_process_and_goes_on_under_another_plan(processes, tmp_path, lora, shard_optimizer):
    plan = make_plan(LORA, dp=2, pp=2, shard_optimizer=shard_optimizer)
    assert_parity(
        processes.run(4, run_rank, LORA, plan, OPTIMIZER), plain_pytorch(LORA, micro_batch_size=2, optimizer=OPTIMIZER)
    )
    whole = processes.run(4, train, plan, tmp_path / "whole", 5)
    for one in whole:
        assert one["frozen"] > 10
        assert one["with_gradient"]
        assert one["state_only_of_trained"]
    processes.run(4, train, plan, tmp_path / "parts", 1)
    other = make_plan(LORA, dp=1, pp=4)
    for one in processes.run(4, train, other, tmp_path / "parts", 5):
        assert one["first"] >= 1
        assert one["loss"] == pytest.approx(whole[0]["loss"][one["first"] :], rel=1e-5)
