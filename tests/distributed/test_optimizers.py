"""Optimizers that are given by name or by import path equal one process, with stages and pipelines on several ranks."""

from dataclasses import replace

import pytest
import torch

from tests.distributed.parity import ADAMW, assert_parity, make_plan, plain_pytorch, run_rank


class Halved(torch.optim.Adam):
    """An optimizer of a user's own."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["eps"] = 1e-6
        super().step()


CASES = {  # each with an epsilon above the noise of gradients that are zero but for rounding
    "adafactor": replace(ADAMW, optimizer="adafactor", arguments={"eps": (1e-8, 1e-3)}),
    "RMSprop": replace(ADAMW, optimizer="torch.optim.RMSprop", arguments={"alpha": 0.9, "eps": 1e-4}),
    "import path": replace(ADAMW, optimizer=f"{__name__}:Halved", arguments={"eps": 1e-6}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(processes, case):
    plan = make_plan("gpt2", dp=2, pp=2, shard_optimizer=case == "RMSprop")
    ranks = processes.run(4, run_rank, "gpt2", plan, CASES[case])
    assert_parity(ranks, plain_pytorch("gpt2", micro_batch_size=2, optimizer=CASES[case]))
