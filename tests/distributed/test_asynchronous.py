"""Asynchronous schedules equal plain PyTorch on one process whose weights are as old: a list of all versions."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from auto3d.partition.stage import cut
from auto3d.plan import Plan
from auto3d.runtime.data import Batches
from auto3d.runtime.optimizer import OptimizerSettings, build_optimizer
from auto3d.runtime.rank import TrainingSettings, build_rank, schedules_of
from auto3d.runtime.world import join, leave
from auto3d.schedule.memory import weight_copies
from tests.distributed.parity import SGD, assert_close, make_plan
from tests.models import MODELS, captured

ITERATIONS = 3
NO_CLIPPING = replace(SGD, clip_norm=0.0)


def run_rank(world, model: str, plan: Plan, optimizer: OptimizerSettings = NO_CLIPPING) -> dict:
    """Train as one rank; returns its results, final parameters, and the most versions of its weights in memory."""
    settings = TrainingSettings(
        iterations=ITERATIONS, optimizer=optimizer, device="cpu", threads_per_rank=1, timeout_s=60
    )
    join(world, device=torch.device("cpu"), timeout_s=60)
    try:
        rank = build_rank(captured(model, plan.micro_batch_size), plan, settings, MODELS[model][1], world)
        watched = next(parameter for parameter in rank.parameters.values() if parameter.requires_grad)
        seen = {watched.data_ptr(): StorageWeakRef(watched.untyped_storage())}
        held = []

        def count(*_) -> None:
            """The memory of every version, newest included, that something still refers to."""
            seen[watched.data_ptr()] = StorageWeakRef(watched.untyped_storage())
            held.append(sum(not storage.expired() for storage in seen.values()))

        counting = register_optimizer_step_post_hook(count)
        results = []
        for program in rank.programs:
            results += rank.executor.run(program, len(results))
        counting.remove()
        parameters = {name: p.detach().numpy().copy() for name, p in rank.parameters.items()}
        return {"results": results, "parameters": parameters, "held": max(held)}
    finally:
        leave()


def plain_pytorch_with_old_weights(model: str, plan: Plan, *, flush_every: int = ITERATIONS) -> dict:
    """The reference: the unmodified model runs each micro-batch with the weights that each stage has for it."""
    build, data = MODELS[model]
    torch.manual_seed(plan.seed)
    module = build()
    module.train()
    newest = {name: nn.Parameter(p.detach().clone()) for name, p in module.named_parameters()}
    step, learning_rate = build_optimizer(list(newest.values()), NO_CLIPPING, iterations=ITERATIONS)
    batches = Batches(data, seed=plan.seed, global_batch=plan.global_batch, micro_batch_size=plan.micro_batch_size)
    stage_of = {name: stage.index for stage in cut(captured(model, 2).graph, plan.stages) for name in stage.state}
    count = plan.micro_batches
    every = {"pipedream": 1, "pipedream-2bw": count}[plan.schedule]  # micro-batches to an update

    def updates_seen(stage: int, number: int) -> int:
        begun = number - number % (flush_every * count)
        if plan.schedule == "pipedream":
            return begun + max(0, number - begun - (plan.pp - 1 - stage))
        return begun // count + max(0, (number - begun) // count - 1)

    versions = [{name: p.detach().clone() for name, p in newest.items()}]
    losses = [0.0] * ITERATIONS
    for number in range(ITERATIONS * count):
        iteration, index = divmod(number, count)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(versions[updates_seen(stage_of.get(name, 0), number)][name])
        for replica in range(plan.dp):
            inputs = batches.micro_batch(iteration, replica * count + index, tuple(data.inputs))
            output = module(**inputs)
            loss = output if isinstance(output, torch.Tensor) else output["loss"]
            (loss / (plan.dp * every)).backward()
            losses[iteration] += loss.item() / (plan.dp * count)
        if (number + 1) % every == 0:
            for name, parameter in module.named_parameters():
                newest[name].grad = parameter.grad
            module.zero_grad()
            step.step()
            versions.append({name: p.detach().clone() for name, p in newest.items()})
        if index == count - 1:
            learning_rate.step()
    return {"losses": losses, "parameters": {name: p.detach().numpy() for name, p in newest.items()}}


def assert_parity(ranks: list[dict], reference: dict) -> None:
    seen = set()
    for number, rank in enumerate(ranks):
        losses = torch.tensor([result.loss for result in rank["results"]]).numpy()
        assert_close(losses, torch.tensor(reference["losses"]).numpy(), f"losses, rank {number}")
        assert all(result.grad_norm is None for result in rank["results"])
        for name, value in rank["parameters"].items():
            assert_close(value, reference["parameters"][name], f"{name}, rank {number}")
        seen.update(rank["parameters"])
    assert seen == set(reference["parameters"]), "together, the ranks hold every parameter"


PIPEDREAM = [  # of models without tied parameters
    ("llama", 1, 2, 4, {}),
    ("llama", 1, 4, 4, {}),
    ("llama", 2, 2, 3, {"recompute": "full"}),
    ("vit", 1, 4, 1, {}),
    ("vit", 1, 4, 6, {"recompute": "full", "sync": "eager"}),
]
DOUBLE_BUFFERED = [
    ("llama", 1, 4, 4, {}),
    ("gpt2", 1, 2, 4, {"recompute": "full"}),
    ("gpt2", 2, 2, 3, {}),
    ("t5", 1, 4, 3, {}),
    ("bert", 1, 4, 5, {"recompute": "full"}),
    ("averaging", 1, 2, 4, {"recompute": "full"}),
    ("residual", 1, 3, 4, {}),
    ("llama", 2, 1, 2, {}),
]


@pytest.mark.parametrize(
    ("schedule", "model", "dp", "pp", "micro_batches", "options"),
    [("pipedream", *case) for case in PIPEDREAM] + [("pipedream-2bw", *case) for case in DOUBLE_BUFFERED],
)
def test_equals_plain_pytorch_with_weights_as_old(processes, schedule, model, dp, pp, micro_batches, options):
    plan = make_plan(model, dp=dp, pp=pp, micro_batches=micro_batches, schedule=schedule, options=options)
    ranks = processes.run(plan.ranks, run_rank, model, plan)
    assert_parity(ranks, plain_pytorch_with_old_weights(model, plan))
    (whole,) = schedules_of(plan, ITERATIONS)
    for own, promised in zip(plan.placement, weight_copies(whole), strict=True):
        assert {ranks[rank]["held"] for rank in own} == {promised}


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_a_flush_lets_the_next_iterations_begin_with_the_newest_weights(processes, schedule):
    """Two iterations, a flush, and the one that is left."""
    plan = make_plan("llama", dp=1, pp=4, micro_batches=4, schedule=schedule, options={"iterations": 2})
    ranks = processes.run(4, run_rank, "llama", plan)
    assert_parity(ranks, plain_pytorch_with_old_weights("llama", plan, flush_every=2))


def test_dropout_is_that_of_the_same_iteration_and_micro_batch(processes):
    """Without learning, weights are never old, and all schedules must draw the same."""
    still = replace(NO_CLIPPING, learning_rate=0.0)
    plan = make_plan("gpt2-dropout", dp=2, pp=2, micro_batches=3)
    expected = [result.loss for result in processes.run(4, run_rank, "gpt2-dropout", plan, still)[0]["results"]]
    assert len(set(expected)) == ITERATIONS
    old = replace(plan, schedule="pipedream-2bw")
    assert [result.loss for result in processes.run(4, run_rank, "gpt2-dropout", old, still)[0]["results"]] == expected

    kept = processes.run(4, run_rank, "gpt2-dropout", old)
    again = processes.run(4, run_rank, "gpt2-dropout", replace(old, schedule_options={"recompute": "full"}))
    for a, b in zip(kept, again, strict=True):
        assert a["results"] == b["results"]
        for name, value in a["parameters"].items():
            assert (value == b["parameters"][name]).all(), name
