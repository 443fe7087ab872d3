"""What a script draws from torch's generator between iterations is its own sequence, whatever the stages draw."""

from functools import partial

import torch

from auto3d.runtime.process.world import leave
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.training import train
from tests.distributed.parity import ADAMW, make_plan
from tests.models import TRAINED, captured

MODEL, ITERATIONS, SEED = "gpt2-dropout", 3, 5


def drawn(world, plan):
    """The losses, and what the script has drawn after each iteration."""
    settings = TrainingSettings(iterations=ITERATIONS, optimizer=ADAMW, device="cpu", threads_per_rank=1, timeout_s=60)
    torch.manual_seed(SEED)
    numbers = []
    result = train(
        captured(MODEL, plan.micro_batch_size),
        plan,
        settings,
        TRAINED[MODEL][1],
        world,
        on_iteration=lambda *_: numbers.append(torch.rand(()).item()),
    )
    leave()
    return result.loss, numbers


def test_stages_with_dropout_leave_the_generator_to_the_script(processes):
    plan = make_plan(MODEL, dp=1, pp=2)
    (loss, numbers), other = processes.run(2, partial(drawn, plan=plan))
    assert other == (loss, numbers)
    torch.manual_seed(SEED)
    assert numbers == [torch.rand(()).item() for _ in range(ITERATIONS)]
