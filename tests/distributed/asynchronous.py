"""Compares asynchronous training with plain PyTorch that uses equally old weights: rank, reference and bound."""

from dataclasses import replace

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from auto3d.data import Batches
from auto3d.partition.stage import cut
from auto3d.plan import Plan
from auto3d.runtime.optimizer.build import build_optimizer
from auto3d.runtime.process.world import join, leave
from auto3d.runtime.rank import build_rank
from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.runtime.verify.eager import autocast
from tests.distributed.parity import SGD, assert_close
from tests.models import TRAINED, captured, precision_of

ITERATIONS = 3
NO_CLIPPING = replace(SGD, clip_norm=0.0)


def run_rank(world, model: str, plan: Plan, optimizer: OptimizerSettings = NO_CLIPPING) -> dict:
    """Train as one rank; returns its results, its final parameters, and its peak number of weight versions."""
    settings = TrainingSettings(
        iterations=ITERATIONS,
        optimizer=optimizer,
        device="cpu",
        threads_per_rank=1,
        timeout_s=60,
        precision=precision_of(model),
    )
    join(world, device=torch.device("cpu"), timeout_s=60)
    try:
        rank = build_rank(captured(model, plan.micro_batch_size), plan, settings, TRAINED[model][1], world)
        watched = next(parameter for parameter in rank.parameters.values() if parameter.requires_grad)
        seen = {watched.data_ptr(): StorageWeakRef(watched.untyped_storage())}
        held = []

        def count(*_) -> None:
            """The memory of every version that is still referenced, including the newest."""
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
    """The reference: the unmodified model, which runs each micro-batch with the weights that the stages have for it."""
    build, data = TRAINED[model]
    torch.manual_seed(plan.seed)
    module = build()
    module.train()
    newest = {name: nn.Parameter(p.detach().clone()) for name, p in module.named_parameters()}
    step, learning_rate = build_optimizer(list(newest.values()), NO_CLIPPING, iterations=ITERATIONS)
    batches = Batches(data, seed=plan.seed, global_batch=plan.global_batch, micro_batch_size=plan.micro_batch_size)
    stage_of = {name: stage.index for stage in cut(captured(model, 2).graph, plan.stages) for name in stage.state}
    count = plan.micro_batches
    every = {"pipedream": 1, "pipedream-2bw": count}[plan.schedule]  # micro-batches per update

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
            with autocast(captured(model, 2), torch.device("cpu")):
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
