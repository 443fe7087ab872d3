"""TrainingArguments as the settings of a training."""

import torch
from transformers.training_args import OptimizerNames, SchedulerType

from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.trainer.arguments import TrainingArguments

_OPTIMIZERS = {
    OptimizerNames.ADAMW_TORCH: "adamw",
    OptimizerNames.ADAMW_TORCH_FUSED: "adamw",
    OptimizerNames.SGD: "sgd",
}
_SCHEDULES = {SchedulerType.CONSTANT_WITH_WARMUP: "constant"}  # others have the same name


def training_settings(args: TrainingArguments, iterations: int) -> TrainingSettings:
    """The settings of a training of ``iterations`` steps; supported.py has refused what they cannot express."""
    schedule = SchedulerType(args.lr_scheduler_type)
    # transformers has no warm-up under the schedule "constant", whatever warmup_steps says.
    warm_up = 0 if schedule is SchedulerType.CONSTANT else args.get_warmup_steps(iterations)
    return TrainingSettings(
        iterations=iterations,
        optimizer=OptimizerSettings(
            optimizer=_OPTIMIZERS[OptimizerNames(args.optim)],
            learning_rate=args.learning_rate,
            weight_decay=args.weight_decay,
            momentum=0.0,
            betas=(args.adam_beta1, args.adam_beta2),
            learning_rate_schedule=_SCHEDULES.get(schedule, schedule.value),
            warmup_iterations=warm_up,
            clip_norm=args.max_grad_norm or 0.0,
        ),
        device=args.device.type,
        threads_per_rank=args.threads_per_rank or torch.get_num_threads(),
        timeout_s=args.ddp_timeout,
        tf32=bool(args.tf32),
        deterministic=args.full_determinism,
    )
