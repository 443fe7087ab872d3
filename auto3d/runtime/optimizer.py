"""Optimizer and learning-rate schedule, from torch and transformers."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from auto3d.errors import InputError
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.settings import LEARNING_RATE_SCHEDULES, OPTIMIZERS, OptimizerSettings
from auto3d.runtime.sharded_optimizer import ShardedOptimizer

Optimizer = torch.optim.Optimizer | ShardedOptimizer


def local_optimizer(optimizer: Optimizer) -> torch.optim.Optimizer:
    """The optimizer of what this rank updates."""
    return optimizer.shard if isinstance(optimizer, ShardedOptimizer) else optimizer


def state_by_parameter(optimizer: Optimizer) -> Mapping[nn.Parameter, dict[str, torch.Tensor]]:
    """What ``optimizer`` keeps of each parameter; of those that other ranks update, nothing."""
    return local_optimizer(optimizer).state


def advance(optimizer: Optimizer, learning_rate: LRScheduler, iterations: int) -> None:
    """Set the learning rate to what it is after so many iterations."""
    learning_rate.last_epoch = iterations
    groups = local_optimizer(optimizer).param_groups
    for group, base, factor in zip(groups, learning_rate.base_lrs, learning_rate.lr_lambdas, strict=True):
        group["lr"] = base * factor(iterations)


def make_state(optimizer: Optimizer) -> None:
    """Make the state that ``optimizer`` would make at its first step: before activations take memory, not in between.

    So what does not fit is found at once, and a CPU's heap has no long-lived pieces among the short-lived ones.
    """
    optimizer = local_optimizer(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(optimizer, torch.optim.AdamW):
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                where = parameter.device if group["fused"] else torch.device("cpu")
                optimizer.state[parameter] = {"step": torch.tensor(0.0, device=where), **moments}
            elif group["momentum"]:
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}


def update(optimizer: Optimizer, *, run_ahead: RunAhead, timeout_s: float) -> None:
    """One step; where other ranks update a share of the parameters, until these have come."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.step(run_ahead=run_ahead, timeout_s=timeout_s)
    else:
        optimizer.step()


def _have_fused_update(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether torch's fused kernels of a GPU can update ``parameters``.

    torch's default there makes a temporary copy of all parameters (``_multi_tensor_adam``), and launches a dozen
    kernels where a fused update is one. Both update each element by itself, so that it does not matter for the bits
    which parameters a rank updates together. A fused kernel wants real numbers, and gradients that lie in memory as
    their parameters do, which flat gradient buffers and autograd grant to contiguous ones.
    """
    return all(p.is_cuda and p.is_floating_point() and p.is_contiguous() for p in parameters)


def build_optimizer(
    parameters: Sequence[nn.Parameter],
    settings: OptimizerSettings,
    *,
    iterations: int,
    shard_over: dist.ProcessGroup | None = None,
) -> tuple[Optimizer, LRScheduler]:
    """The optimizer of ``parameters`` and its schedule over ``iterations`` iterations; InputError for unknown names.

    The ranks of ``shard_over`` update a share each and send it to the others (ZeRO-1).
    """
    from transformers.optimization import get_scheduler  # half a second, which drivers of trials do without

    options = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.optimizer == "adamw":
        family, options["betas"] = torch.optim.AdamW, settings.betas
    elif settings.optimizer == "sgd":
        family, options["momentum"] = torch.optim.SGD, settings.momentum
    else:
        raise InputError(f"optimizer: {settings.optimizer!r} is not known; there are {', '.join(OPTIMIZERS)}")
    if _have_fused_update(parameters):
        options["fused"] = True
    optimizer: Optimizer
    if shard_over is None:
        optimizer = family(parameters, **options)
    else:
        optimizer = ShardedOptimizer(parameters, partial(family, **options), shard_over)
    name = settings.learning_rate_schedule
    if name not in LEARNING_RATE_SCHEDULES:
        raise InputError(
            f"learning_rate_schedule: {name!r} is not known; there are {', '.join(LEARNING_RATE_SCHEDULES)}"
        )
    return optimizer, get_scheduler(
        "constant_with_warmup" if name == "constant" else name,
        local_optimizer(optimizer),
        num_warmup_steps=settings.warmup_iterations,
        num_training_steps=iterations,
    )
