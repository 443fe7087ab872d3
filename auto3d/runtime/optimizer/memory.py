"""Memory and matrix products of optimizers: their state, and the temporaries and FLOPs of an update.

This module imports torch only for optimizers that it must measure, because planning does not need it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import prod

from auto3d.capture.graph import Graph
from auto3d.cost.training_options import TrainingOptions
from auto3d.runtime.optimizer.parameter_groups import update_rules
from auto3d.runtime.settings import MUON, OptimizerSettings

OfParameter = Callable[[str, Sequence[int]], float]
"""A figure of a parameter of this name and shape."""
_NEWTON_SCHULZ_STEPS = 5  # torch.optim.Muon takes so many by default
_MUON_CLASS = "torch.optim.Muon"


def state_elements(settings: OptimizerSettings) -> Callable[[Sequence[int]], float]:
    """The elements of the state of a parameter of some shape; optimizers that are not known here are measured.

    ``settings`` have no groups.
    """
    if settings.optimizer == "adamw" and not settings.arguments:
        return lambda shape: 2 * prod(shape)
    if settings.optimizer == "sgd" and not settings.arguments:
        return lambda shape: (settings.momentum > 0) * prod(shape)
    from auto3d.runtime.optimizer.state import measured_state_elements  # imports torch

    return measured_state_elements(settings)


def state_copies(settings: OptimizerSettings) -> float:
    """Number of values in the optimizer's state for each trained value of a large matrix."""
    shape = (1024, 1024)
    return state_elements(replace(settings, groups=(), exempt=()))(shape) / prod(shape)


def update_copies(settings: OptimizerSettings, device: str) -> tuple[int, int]:
    """Temporary tensors of an update on ``device`` "cpu" or "cuda": copies of a parameter and its predecessor.

    On a CPU torch updates parameters one after the other (``_single_tensor_adam``). AdamW allocates the root of the
    second moment and a quotient of it, while a variable still holds the previous parameter's quotient; SGD allocates
    the sum of gradient and weight decay. The fused kernels of a GPU allocate nothing. Other optimizers are taken to
    allocate as much as AdamW.
    """
    if settings.groups:
        return (2, 1)
    if settings.optimizer == "sgd":
        return (int(device == "cpu" and settings.weight_decay > 0), 0)
    return (0, 0) if device == "cuda" and settings.optimizer == "adamw" else (2, 1)


def memory_options(
    settings: OptimizerSettings, device: str, precision: str, graph: Callable[[], Graph]
) -> TrainingOptions:
    """How a rank on ``device`` "cpu" or "cuda" holds weights, gradients and the optimizer's state.

    ``precision`` is the type of autocast; "float32" is without it. ``graph`` is asked for only where parameters are
    updated in different ways.
    """
    return TrainingOptions(
        precision=precision,
        autocast=precision != "float32",
        moments=0.0 if settings.offload else state_copies(settings),
        state_elements=None if settings.offload else state_of_parameters(settings, graph),
        update_copies=(0, 0) if settings.offload else update_copies(settings, device),
        sums_have_copies=device == "cpu",
    )


def state_of_parameters(settings: OptimizerSettings, graph: Callable[[], Graph]) -> OfParameter:
    """The elements of the optimizer's state of a parameter of ``graph``, or of a shard of it."""
    if not settings.groups and settings.optimizer != MUON:
        of_shape = state_elements(settings)
        return lambda _, shape: of_shape(shape)
    rule_of = _rules(settings, graph)
    of_rule = cache(state_elements)
    return lambda name, shape: of_rule(rule_of(name))(shape)


def flops_of_parameters(settings: OptimizerSettings, graph: Callable[[], Graph]) -> OfParameter | None:
    """The FLOPs of the matrix products of an update of a parameter; None for an optimizer without any that is known."""
    if not any(
        optimizer in (MUON, _MUON_CLASS) for optimizer in (settings.optimizer, *(g.optimizer for g in settings.groups))
    ):
        return None
    rule_of = _rules(settings, graph)

    def flops(name: str, shape: Sequence[int]) -> float:
        rule = rule_of(name)
        if rule.optimizer not in (MUON, _MUON_CLASS):
            return 0.0
        short, long = sorted(shape)
        # Each step of Newton and Schulz multiplies a matrix by its transpose, the result by itself, and that by the
        # matrix.
        steps = rule.arguments.get("ns_steps", _NEWTON_SCHULZ_STEPS)
        return float(steps * (4 * short * short * long + 2 * short**3))

    return flops


def _rules(settings: OptimizerSettings, graph: Callable[[], Graph]) -> Callable[[str], OptimizerSettings]:
    """The rule of a parameter by its name."""
    rules = cache(lambda: update_rules(graph(), settings))
    return lambda name: rules()[name]
