"""Settings of a training. This module does not import torch, because planning does not need it."""

from dataclasses import dataclass
from typing import Any

from auto3d.runtime.emulation import Emulation

OPTIMIZERS = ("adamw", "sgd")
LEARNING_RATE_SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    optimizer: str = "adamw"  # one of OPTIMIZERS
    learning_rate: float = 1e-3  # highest learning rate of the schedule
    weight_decay: float = 0.0
    momentum: float = 0.9  # only for sgd
    betas: tuple[float, float] = (0.9, 0.999)  # only for adamw
    learning_rate_schedule: str = "constant"  # one of LEARNING_RATE_SCHEDULES, after the warm-up
    warmup_iterations: int = 0  # iterations in which the rate rises linearly from 0
    clip_norm: float = 1.0  # upper bound of the global gradient norm; 0: no clipping


def state_copies(settings: OptimizerSettings) -> int:
    """Number of values in the optimizer's state for each trained value."""
    return {"adamw": 2, "sgd": int(settings.momentum > 0)}.get(settings.optimizer, 0)


def update_copies(settings: OptimizerSettings, device: str) -> tuple[int, int]:
    """Temporary tensors of an update on ``device`` "cpu" or "cuda": copies of a parameter, and of the one before it.

    On a CPU torch updates parameters one after the other (``_single_tensor_adam``). AdamW allocates the root of the
    second moment and a quotient of it, while a variable still holds the previous parameter's quotient; SGD allocates
    the sum of gradient and weight decay. The fused kernels of a GPU allocate nothing.
    """
    if device == "cuda":
        return 0, 0
    return {"adamw": (2, 1), "sgd": (int(settings.weight_decay > 0), 0)}.get(settings.optimizer, (0, 0))


def optimizer_copies(settings: OptimizerSettings, device: str) -> dict[str, Any]:
    """The arguments of ``auto3d.cost.device_memory.predict`` that depend on the optimizer."""
    return {"optimizer_copies": state_copies(settings), "update_copies": update_copies(settings, device)}


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    iterations: int
    optimizer: OptimizerSettings = OptimizerSettings()
    device: str = "cpu"  # "cpu" or "cuda"
    threads_per_rank: int = 1  # threads with which a CPU rank computes
    timeout_s: float = 300.0  # time-out of every wait for another rank
    precision: str = "float32"  # precision in which the model was captured, one of capture.autocast.PRECISIONS
    tf32: bool = False  # on GPUs: matrix products and convolutions round their float32 inputs to TF32
    compile: bool = False  # torch.compile the operators of each stage
    deterministic: bool = False  # allow only bitwise reproducible algorithms
    emulation: Emulation | None = None  # emulated devices, whose operations only wait; None: real devices
