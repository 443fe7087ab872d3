"""Stages compiled by torch.compile train as one process does, and are compiled before the first message only."""

from typing import Any
from unittest.mock import patch

import pytest
from torch._dynamo.utils import counters

from auto3d.errors import InputError
from auto3d.plan import SUB_PIPELINED, Plan
from auto3d.runtime.layout import lay_out_plan
from auto3d.runtime.process.world import World
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.stage.module import StageModule
from tests.distributed.parity import SGD, assert_parity, make_plan, plain_pytorch, run_rank
from tests.models import captured

CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"pp": 2, "options": {"recompute": "full"}}),
    ("residual", {"pp": 2}),
    ("gpt2", {"pp": 2, "schedule": "chimera"}),
    ("gpt2", {"pp": 2, "schedule": "zb-h1"}),
    ("gpt2", {"pp": 1, "tp": 2}),
    ("gpt2", {"pp": 1, "tp": 2, "sequence_parallel": True, "options": {"recompute": "full"}}),
    ("gpt2", {"pp": 1, "tp": 2, "tensor_overlap": SUB_PIPELINED}),
]


def run_compiled(world: World, model: str, plan: Plan) -> dict:
    """As ``run_rank``, and fails if anything is compiled after the warm-up."""
    warm_up, compiled = StageModule.warm_up, []

    def counted(stage: StageModule, *arguments: object) -> None:
        warm_up(stage, *arguments)
        compiled.append(counters["stats"]["unique_graphs"])

    with patch.object(StageModule, "warm_up", counted):
        result = run_rank(world, model, plan, SGD, compile=True)
    assert compiled[-1] > 0
    assert counters["stats"]["unique_graphs"] == compiled[-1], "the loop compiles"
    return result


@pytest.mark.soak  # a rank compiles for a minute
@pytest.mark.parametrize(("model", "how"), CASES)
def test_equals_one_process(processes, model, how):
    plan = make_plan(model, dp=1, **how)
    ranks = processes.run(plan.ranks, run_compiled, model, plan)
    assert_parity(ranks, plain_pytorch(model, micro_batch_size=2, optimizer=SGD))


@pytest.mark.parametrize(("schedule", "reason"), [("seq1f1b", "keys and values")])
def test_what_cannot_hold_is_refused(schedule, reason):
    plan = make_plan("gpt2", dp=1, pp=2, schedule=schedule)
    settings = TrainingSettings(iterations=1, compile=True)
    with pytest.raises(InputError, match=reason):
        lay_out_plan(captured("gpt2", 2), plan, settings)
