"""Optimizers of torch and learning-rate schedules of transformers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from auto3d.errors import InputError
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.settings import LEARNING_RATE_SCHEDULES, OPTIMIZERS, OptimizerSettings
from auto3d.runtime.sharded_optimizer import ShardedOptimizer

Optimizer = torch.optim.Optimizer | ShardedOptimizer


def local_optimizer(optimizer: Optimizer) -> torch.optim.Optimizer:
    """The optimizer of the parameters that this rank updates."""
    return optimizer.shard if isinstance(optimizer, ShardedOptimizer) else optimizer


def state_by_parameter(optimizer: Optimizer) -> Mapping[nn.Parameter, dict[str, torch.Tensor]]:
    """The optimizer's state of each parameter that this rank updates."""
    state: Mapping[Any, dict[str, torch.Tensor]] = local_optimizer(optimizer).state
    return state


def advance(optimizer: Optimizer, learning_rate: LRScheduler, iterations: int) -> None:
    """Set the learning rate to its value after ``iterations`` iterations."""
    assert isinstance(learning_rate, LambdaLR), "all schedules of transformers that auto3d offers are"
    learning_rate.last_epoch = iterations
    groups = local_optimizer(optimizer).param_groups
    for group, base, factor in zip(groups, learning_rate.base_lrs, learning_rate.lr_lambdas, strict=True):
        group["lr"] = base * factor(iterations)


def make_state(optimizer: Optimizer) -> None:
    """Allocate the state that ``optimizer`` would allocate at its first step, before activations take memory.

    A plan that does not fit then fails at once, and a CPU's heap has no long-lived blocks between short-lived ones.
    """
    optimizer = local_optimizer(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(optimizer, torch.optim.AdamW):
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                device = parameter.device if group["fused"] else torch.device("cpu")
                optimizer.state[parameter] = {"step": torch.tensor(0.0, device=device), **moments}
            elif group["momentum"]:
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}


def update(optimizer: Optimizer, *, run_ahead: RunAhead, timeout_s: float) -> None:
    """One step. Under ZeRO-1 it lasts until the parameters that other ranks update have arrived."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.step(run_ahead=run_ahead, timeout_s=timeout_s)
    else:
        optimizer.step()


def _have_fused_update(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether torch's fused GPU kernels can update ``parameters``.

    torch's default on GPUs makes a temporary copy of all parameters (``_multi_tensor_adam``) and launches a dozen
    kernels, whereas a fused update is one kernel. Both update each element independently, so the result does not depend
    on which parameters a rank updates together. A fused kernel requires real numbers, and gradients with the memory
    layout of their parameters, which flat gradient buffers and autograd guarantee for contiguous parameters.
    """
    return all(p.is_cuda and p.is_floating_point() and p.is_contiguous() for p in parameters)


def build_optimizer(
    parameters: Sequence[nn.Parameter],
    settings: OptimizerSettings,
    *,
    iterations: int,
    shard_over: dist.ProcessGroup | None = None,
) -> tuple[Optimizer, LRScheduler]:
    """The optimizer of ``parameters``, and its learning-rate schedule for ``iterations`` iterations.

    With ``shard_over``, each rank of that group updates a shard of the parameters and sends it to the others (ZeRO-1).
    Raises InputError for unknown names.
    """
    options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    kind: type[torch.optim.Optimizer]
    if settings.optimizer == "adamw":
        kind, options["betas"] = torch.optim.AdamW, settings.betas
    elif settings.optimizer == "sgd":
        kind, options["momentum"] = torch.optim.SGD, settings.momentum
    else:
        raise InputError(f"optimizer: {settings.optimizer!r} is not known; use one of {', '.join(OPTIMIZERS)}")
    if _have_fused_update(parameters):
        options["fused"] = True
    optimizer: Optimizer
    if shard_over is None:
        optimizer = kind(parameters, **options)
    else:
        optimizer = ShardedOptimizer(parameters, partial(kind, **options), shard_over)
    name = settings.learning_rate_schedule
    if name not in LEARNING_RATE_SCHEDULES:
        raise InputError(
            f"learning_rate_schedule: {name!r} is not known; use one of {', '.join(LEARNING_RATE_SCHEDULES)}"
        )
    return optimizer, _learning_rate_schedule(local_optimizer(optimizer), name, settings.warmup_iterations, iterations)


def learning_rate_of(settings: OptimizerSettings, iterations: int) -> Callable[[int], float]:
    """The learning rate by iteration, from 0, of a training of ``iterations`` iterations.

    It is the same on every rank, also on one that trains nothing.
    """
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=settings.learning_rate)
    schedule = _learning_rate_schedule(
        stand_in, settings.learning_rate_schedule, settings.warmup_iterations, iterations
    )
    assert isinstance(schedule, LambdaLR), "all schedules of transformers that auto3d offers are"
    (factor,) = schedule.lr_lambdas
    return lambda iteration: settings.learning_rate * factor(iteration)


def _learning_rate_schedule(optimizer: torch.optim.Optimizer, name: str, warmup: int, iterations: int) -> LRScheduler:
    if name == "constant" and not warmup:
        return LambdaLR(optimizer, lambda _: 1.0)
    from transformers.optimization import get_scheduler  # takes each rank two seconds if nothing else needs it

    return get_scheduler(
        "constant_with_warmup" if name == "constant" else name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=iterations,
    )
