"""How a Plan is trained, in numbers and names. It needs no torch, for whoever only plans."""

from dataclasses import dataclass
from typing import Any

from auto3d.runtime.emulation import Emulation

OPTIMIZERS = ("adamw", "sgd")
LEARNING_RATE_SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    optimizer: str  # one of OPTIMIZERS
    learning_rate: float  # the highest of the schedule
    weight_decay: float
    momentum: float  # sgd
    betas: tuple[float, float]  # adamw
    learning_rate_schedule: str  # one of LEARNING_RATE_SCHEDULES, after the warm-up
    warmup_iterations: int  # the rate rises linearly from 0
    clip_norm: float  # of the global gradient norm; 0 does not clip


def state_copies(settings: OptimizerSettings) -> int:
    """How many values the optimizer keeps for each one that is trained."""
    return {"adamw": 2, "sgd": int(settings.momentum > 0)}.get(settings.optimizer, 0)


def update_copies(settings: OptimizerSettings, device: str) -> tuple[int, int]:
    """Temporaries of an update on a ``device`` "cpu" or "cuda": copies of a parameter, and of the one before it.

    torch updates the parameters of a CPU one after the other (``_single_tensor_adam``). AdamW makes the root of the
    second moment and a quotient of it, while a variable still holds the quotient of the parameter before; SGD makes
    the sum of gradient and weight decay. The fused kernels of a GPU make nothing.
    """
    if device == "cuda":
        return 0, 0
    return {"adamw": (2, 1), "sgd": (int(settings.weight_decay > 0), 0)}.get(settings.optimizer, (0, 0))


def optimizer_copies(settings: OptimizerSettings, device: str) -> dict[str, Any]:
    """What ``auto3d.cost.device_memory.predict`` has to know of the optimizer."""
    return {"optimizer_copies": state_copies(settings), "update_copies": update_copies(settings, device)}


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    iterations: int
    optimizer: OptimizerSettings
    device: str  # "cpu" or "cuda"
    threads_per_rank: int  # of a CPU rank's arithmetic
    timeout_s: float  # of every wait for another rank
    tf32: bool = False  # on GPUs: matrix products and convolutions round their float32 inputs to TF32
    deterministic: bool = False  # only algorithms that give the same bits each time
    emulation: Emulation | None = None  # of devices in whose place operations only wait; None: real ones
