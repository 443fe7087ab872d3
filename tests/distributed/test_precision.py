"""Training in bfloat16 equals one process under torch.autocast that accumulates the same micro-batches.

The bound is that of float32: every operation runs on the same values, and messages carry bfloat16 as it is, so only the
order in which float32 gradients are added differs. The reference begins each iteration with the weights of our run:
rounded to bfloat16, a weight that differs in its last bit may differ by 2^-8, and whether any does depends on the
kernels of the processor. A weight that several operations use in low precision would differ more, because autocast adds
the gradients of its uses in low precision; none of these models has one.
"""

from dataclasses import replace

import pytest

from tests.distributed import asynchronous
from tests.distributed.parity import (
    ADAMW,
    SGD,
    assert_parity,
    make_plan,
    parameters_after,
    plain_pytorch,
    run_rank,
)
from tests.soak import soak

CASES = [
    ("gpt2-dropout@bfloat16", 2, 2, "chimera", {}),
    ("vit@bfloat16", 1, 4, "zb-h1", {}),
    ("t5@bfloat16", 1, 4, "1f1b", {"recompute": "full"}),
    ("averaging@bfloat16", 1, 2, "1f1b", {}),
    *soak(
        ("gpt2-dropout@bfloat16", 2, 2, "1f1b", {}),
        ("gpt2@bfloat16", 2, 2, "1f1b", {"recompute": "full"}),
        ("llama@bfloat16", 2, 2, "zb-h1", {}),
        ("resnet-transformers@bfloat16", 1, 2, "zb-h1", {}),
    ),
]


def reference(model: str, ranks: list[dict]) -> list[dict]:
    return plain_pytorch(model, micro_batch_size=2, optimizer=SGD, after=parameters_after(ranks))


@pytest.mark.parametrize(("model", "dp", "pp", "schedule", "options"), CASES)
def test_equals_one_process_under_autocast(processes, model, dp, pp, schedule, options):
    plan = make_plan(model, dp=dp, pp=pp, schedule=schedule, options=options)
    ranks = processes.run(plan.ranks, run_rank, model, plan, SGD)
    assert_parity(ranks, reference(model, ranks))


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_old_weights_keep_their_copies(processes, schedule):
    plan = make_plan("llama@bfloat16", dp=1, pp=2, micro_batches=4, schedule=schedule)
    ranks = processes.run(plan.ranks, asynchronous.run_rank, "llama@bfloat16", plan)
    asynchronous.assert_parity(ranks, asynchronous.plain_pytorch_with_old_weights("llama@bfloat16", plan))


def test_a_sharded_optimizer_renews_the_copies_of_weights_that_another_rank_updates(processes):
    """By SGD: AdamW magnifies the rounding of small gradients beyond the bound on some texts, without ZeRO-1 too."""
    plan = make_plan("gpt2@bfloat16", dp=2, pp=2, shard_optimizer=True)
    ranks = processes.run(plan.ranks, run_rank, "gpt2@bfloat16", plan, SGD)
    assert_parity(ranks, reference("gpt2@bfloat16", ranks))


@pytest.mark.soak
def test_the_loss_is_that_of_float32_within_two_percent(processes):
    """After 30 iterations on text."""
    found = {}
    for model in ("gpt2", "gpt2@bfloat16"):
        plan = make_plan(model, dp=1, pp=2, micro_batch_size=4)
        rank = processes.run(2, run_rank, model, plan, replace(ADAMW, clip_norm=1.0), None, None, 30)[0]
        losses = [entry["result"].loss for entry in rank["history"]]
        found[model] = sum(losses[-5:]) / 5
        assert found[model] < 0.9 * losses[0], "it learns"
    assert found["gpt2@bfloat16"] == pytest.approx(found["gpt2"], rel=0.02)
