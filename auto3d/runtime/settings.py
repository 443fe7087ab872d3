"""Settings of a training. This module does not import torch, because planning does not need it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from auto3d.runtime.emulated.settings import Emulation

MUON = "muon"
OPTIMIZERS = ("adamw", "sgd", "adafactor", MUON)  # beside them, any class by its import path
LEARNING_RATE_SCHEDULES = (
    "constant",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)  # schedules of transformers.get_scheduler that need no metric
FIRST_LOSS_SCALE = 65536.0
LOSS_MEANS = ("targets", "micro-batches")
"""The loss of a global batch: the mean over its targets that are not ignored, or the mean of its micro-batches' losses,
as a loop on one process takes it that divides each loss by their number."""
SUMMED_ITEMS = "summed-items"
LOSSES_OF_TRANSFORMERS = ("items", "sum", SUMMED_ITEMS)
"""What transformers' Trainer takes where a model's forward or a script's loss takes ``num_items_in_batch``. "items":
the sum over targets, divided by the number that the data says, and other terms added up over the micro-batches. "sum":
the losses of the micro-batches added up, because nothing divides by that number. "summed-items": the same, divided by
the number of targets that the data says; the loss is a sum over targets to which a label of -100 adds nothing."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that are updated in another way. What is None here is as in the OptimizerSettings."""

    names: tuple[str, ...] = ("*",)  # names, or globs of names
    dimensions: int | None = None  # only those with so many dimensions; None: any
    optimizer: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)  # further arguments of ``optimizer``
    learning_rate: float | None = None
    weight_decay: float | None = None
    script_group: int | None = None
    """The number of this group in the optimizer of a user's script. Its ``names`` are no globs, and it may have no
    trained parameters."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    optimizer: str = "adamw"
    """One of OPTIMIZERS, or the import path of a torch optimizer: torch.optim.RMSprop, package.module:Class. "muon" is
    Muon for hidden matrices, and adamw for all other parameters."""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)  # further arguments of the class
    learning_rate: float = 1e-3  # highest learning rate of the schedule
    weight_decay: float = 0.0
    exempt: tuple[str, ...] = ()
    """Parameters without weight decay: names, globs of names, or BIASES_AND_NORMS."""
    groups: tuple[ParameterGroup, ...] = ()  # each parameter belongs to the first that has its name
    momentum: float = 0.9  # only for sgd
    betas: tuple[float, float] = (0.9, 0.999)  # only for adamw
    offload: bool = False  # the optimizer's state and its update are on the host
    learning_rate_schedule: str = "constant"  # a name in LEARNING_RATE_SCHEDULES, after the warm-up
    learning_rate_arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)  # arguments of that schedule
    warmup_iterations: int = 0  # iterations in which the rate rises linearly from 0
    clip_norm: float = 1.0  # upper bound of the global gradient norm; 0: no clipping
    clip_value: float = 0.0  # then upper bound of each element's absolute value; 0: none
    clip_ratio: float = 0.0  # then upper bound of the norm of a row, as a part of its weights' norm; 0: none
    script_group: int | None = None  # in the settings of one parameter: its ParameterGroup's

    @property
    def updates_all_alike(self) -> bool:
        """Whether it is AdamW or SGD for all parameters, of which any rank may update any slice."""
        return self.optimizer in ("adamw", "sgd") and not self.groups and not self.clip_ratio


BIASES_AND_NORMS = "biases-and-norms"  # the parameters that transformers' Trainer exempts from weight decay


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
    loss_mean: str = "targets"  # one of LOSS_MEANS and LOSSES_OF_TRANSFORMERS
    loss_scale: float | None = None  # first factor of the loss in a backward, which adapts; None: only in float16
    emulation: Emulation | None = None  # emulated devices, whose operations only wait; None: real devices

    @property
    def weighs_micro_batches_alike(self) -> bool:
        """Whether a micro-batch counts the same however many targets it has."""
        return self.loss_mean in ("micro-batches", "sum")

    @property
    def first_loss_scale(self) -> float | None:
        """The factor that the first backward begins with, by default torch.amp.GradScaler's; None: no factor."""
        return FIRST_LOSS_SCALE if self.loss_scale is None and self.precision == "float16" else self.loss_scale
