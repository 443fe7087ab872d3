"""Memory of optimizers: their state, and the temporaries of an update.

This module imports torch only for optimizers that it must measure, because planning does not need it.
"""

from collections.abc import Callable, Sequence
from math import prod

from auto3d.cost.training_options import TrainingOptions
from auto3d.runtime.settings import OptimizerSettings

StateElements = Callable[[Sequence[int]], int]
"""The elements of the optimizer's state of a parameter of this shape."""


def state_elements(settings: OptimizerSettings) -> StateElements:
    """A function that gives the size of the optimizer's state; it measures optimizers that are not known here."""
    if settings.optimizer == "adamw" and not settings.arguments:
        return lambda shape: 2 * prod(shape)
    if settings.optimizer == "sgd" and not settings.arguments:
        return lambda shape: (settings.momentum > 0) * prod(shape)
    from auto3d.runtime.optimizer_state import measured_state_elements  # imports torch

    return measured_state_elements(settings)


def state_copies(settings: OptimizerSettings) -> float:
    """Number of values in the optimizer's state for each trained value of a large matrix."""
    shape = (1024, 1024)
    return state_elements(settings)(shape) / prod(shape)


def update_copies(settings: OptimizerSettings, device: str) -> tuple[int, int]:
    """Temporary tensors of an update on ``device`` "cpu" or "cuda": copies of a parameter, and of the one before it.

    On a CPU torch updates parameters one after the other (``_single_tensor_adam``). AdamW allocates the root of the
    second moment and a quotient of it, while a variable still holds the previous parameter's quotient; SGD allocates
    the sum of gradient and weight decay. The fused kernels of a GPU allocate nothing. Other optimizers are taken to
    allocate as much as AdamW.
    """
    if settings.optimizer == "sgd":
        return (int(device == "cpu" and settings.weight_decay > 0), 0)
    return (0, 0) if device == "cuda" and settings.optimizer == "adamw" else (2, 1)


def memory_options(settings: OptimizerSettings, device: str, precision: str) -> TrainingOptions:
    """How a rank on ``device`` "cpu" or "cuda" holds weights, gradients and the optimizer's state.

    ``precision`` is that of autocast; "float32" is without it.
    """
    return TrainingOptions(
        precision=precision,
        autocast=precision != "float32",
        moments=0.0 if settings.offload else state_copies(settings),
        state_elements=None if settings.offload else state_elements(settings),
        update_copies=(0, 0) if settings.offload else update_copies(settings, device),
        sums_have_copies=device == "cpu",
    )
