"""Optimizers of torch and learning-rate schedules of transformers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from auto3d.errors import InputError
from auto3d.runtime.optimizer.classes import FUSED, make_optimizer, optimizer_class, traits_of
from auto3d.runtime.optimizer.clipping import clip
from auto3d.runtime.optimizer.offload import offloaded
from auto3d.runtime.optimizer.parameter_groups import UpdateRules
from auto3d.runtime.optimizer.stand_ins import AllParameters
from auto3d.runtime.optimizer.state import note_counts
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.settings import LEARNING_RATE_SCHEDULES, OptimizerSettings
from auto3d.runtime.weights.shard import WeightShard


def advance(optimizer: torch.optim.Optimizer, learning_rate: LRScheduler, iterations: int) -> None:
    """Set the learning rate to its value after ``iterations`` iterations."""
    assert isinstance(learning_rate, LambdaLR), "all schedules of transformers that auto3d offers are"
    learning_rate.last_epoch = iterations
    rates = [
        base * factor(iterations) for base, factor in zip(learning_rate.base_lrs, learning_rate.lr_lambdas, strict=True)
    ]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    learning_rate._last_lr = rates


def _have_fused_update(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether torch's fused GPU kernels can update ``parameters``.

    torch's default on GPUs makes a temporary copy of all parameters (``_multi_tensor_adam``) and launches a dozen
    kernels, whereas a fused update is one kernel. Both update each element independently, so the result does not depend
    on which parameters a rank updates together. A fused kernel requires real numbers, and gradients with the memory
    layout of their parameters, which flat gradient buffers and autograd guarantee for contiguous parameters.
    """
    return all(p.is_cuda and p.is_floating_point() and p.is_contiguous() for p in parameters)


Optimizers = Mapping[OptimizerSettings, tuple[torch.optim.Optimizer, LRScheduler]]
"""The settings of some parameters' updates -> their optimizer, with its learning-rate schedule."""


def build_optimizers(
    parameters: Mapping[str, nn.Parameter],
    rules: UpdateRules,
    *,
    iterations: int,
    shards: Sequence[WeightShard] = (),
    run_ahead: RunAhead | None = None,
    of_all_ranks: AllParameters | None = None,
) -> Optimizers:
    """One optimizer for the ``parameters`` and the slices of ``shards`` (ZeRO-1) of every rule in ``rules``.

    An optimizer that adds up numbers over all parameters does so over the parameters ``of_all_ranks`` (None:
    ``parameters``). The other arguments and errors are as in ``build_optimizer``.
    """
    updated: dict[OptimizerSettings, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        updated.setdefault(rules[name], []).append(parameter)
    for piece in (piece for shard in shards for piece in shard.pieces):
        updated.setdefault(piece.rule, []).append(piece.tensor)
    for rule in updated:
        if of_all_ranks is not None and traits_of(rule).adds_up:
            updated[rule] = of_all_ranks.of([name for name, other in rules.items() if other == rule], parameters)
    return {
        rule: build_optimizer(
            rule_parameters, rule, iterations=iterations, shards=shards, run_ahead=run_ahead, of_all_ranks=of_all_ranks
        )
        for rule, rule_parameters in updated.items()
    }


def build_optimizer(
    parameters: Sequence[nn.Parameter],
    settings: OptimizerSettings,
    *,
    iterations: int,
    shards: Sequence[WeightShard] = (),
    run_ahead: RunAhead | None = None,
    of_all_ranks: AllParameters | None = None,
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """The optimizer of ``parameters``, and its learning-rate schedule for ``iterations`` iterations.

    ``settings`` have no groups. Some parameters may be slices of ``shards``. With ``run_ahead``, and if the settings
    say so, its state and its update are on the host. If some are stand-ins for parameters of other ranks, the
    optimizers of all ranks make their steps together. Raises InputError for settings that no optimizer or schedule
    accepts.
    """
    kind, options = optimizer_class(settings)
    groups: list[dict[str, Any]] = [{"params": list(parameters)}]

    def follow(*_: object) -> None:
        for shard in shards:
            shard.follow()

    if settings.offload and run_ahead is not None:
        optimizer = offloaded(
            groups, lambda on_host: make_optimizer(kind, on_host, options), run_ahead, before_step=follow
        )
    else:
        if kind in FUSED and _have_fused_update(parameters):
            options["fused"] = True
        optimizer = make_optimizer(kind, groups, options)
        if shards:
            optimizer.register_step_pre_hook(follow)
    if settings.clip_value or settings.clip_ratio:
        updated = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if not parameter.is_meta
        ]
        optimizer.register_step_pre_hook(lambda *_: clip(updated, settings))
    note_counts(optimizer, traits_of(settings).counts)
    if of_all_ranks is not None and any(parameter.is_meta for parameter in parameters):
        of_all_ranks.step_together(optimizer)
    return optimizer, _learning_rate_schedule(optimizer, settings, iterations)


def check_schedule(settings: OptimizerSettings, iterations: int) -> None:
    """Raise InputError unless the settings name a learning-rate schedule and its arguments."""
    _learning_rate_schedule(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), settings, iterations)


def learning_rate_of(settings: OptimizerSettings, iterations: int) -> Callable[[int], float]:
    """The learning rate by iteration, from 0, of a training of ``iterations`` iterations.

    It is the same on every rank, also on a rank that trains nothing.
    """
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=settings.learning_rate)
    schedule = _learning_rate_schedule(stand_in, settings, iterations)
    assert isinstance(schedule, LambdaLR), "all schedules of transformers that auto3d offers are"
    (factor,) = schedule.lr_lambdas
    return lambda iteration: settings.learning_rate * factor(iteration)


def _learning_rate_schedule(
    optimizer: torch.optim.Optimizer, settings: OptimizerSettings, iterations: int
) -> LRScheduler:
    name, warmup = settings.learning_rate_schedule, settings.warmup_iterations
    arguments = settings.learning_rate_arguments
    if name not in LEARNING_RATE_SCHEDULES:
        raise InputError(
            f"learning_rate_schedule: {name!r} is not known; use one of {', '.join(LEARNING_RATE_SCHEDULES)}"
        )
    if name.startswith("constant"):
        if arguments:
            raise InputError(f"learning_rate_arguments: {name} takes none; found {', '.join(arguments)}")
        if not warmup:
            return LambdaLR(optimizer, lambda _: 1.0)
    from transformers.optimization import get_scheduler  # takes each rank two seconds if nothing else needs it

    try:
        schedule = get_scheduler(
            "constant_with_warmup" if name == "constant" else name,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=iterations,
            scheduler_specific_kwargs=dict(arguments),
        )
        assert isinstance(schedule, LambdaLR)
        for iteration in (0, iterations // 2, iterations):  # some arguments fail only when they are used
            for factor in schedule.lr_lambdas:
                factor(iteration)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InputError(f"learning_rate_arguments: {name} refuses them: {str(error).splitlines()[0]}") from None
    return schedule
