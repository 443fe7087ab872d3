"""TrainingArguments as the settings of a training."""

from collections.abc import Collection

import torch
from transformers.training_args import OptimizerNames, SchedulerType

from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.trainer.arguments import TrainingArguments

_OPTIMIZERS = {
    OptimizerNames.ADAMW_TORCH: "adamw",
    OptimizerNames.ADAMW_TORCH_FUSED: "adamw",
    OptimizerNames.SGD: "sgd",
    OptimizerNames.ADAFACTOR: "adafactor",
    OptimizerNames.ADAGRAD: "torch.optim.Adagrad",
    OptimizerNames.RMSPROP: "torch.optim.RMSprop",
}
ADAM_EPSILON = 1e-8  # the default of torch
FIRST_LOSS_SCALE = 65536.0  # the default of torch.amp.GradScaler


def precision_of(args: TrainingArguments) -> str:
    """The precision of autocast."""
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"


def training_settings(
    args: TrainingArguments, iterations: int, exempt: Collection[str], loss_mean: str
) -> TrainingSettings:
    """The settings of a training of ``iterations`` steps; supported.py has refused what they cannot express.

    ``exempt`` names the parameters without weight decay.
    """
    schedule = SchedulerType(args.lr_scheduler_type)
    optimizer = _OPTIMIZERS[OptimizerNames(args.optim)]
    # transformers has no warm-up under the schedule "constant", whatever warmup_steps says.
    warm_up = 0 if schedule is SchedulerType.CONSTANT else args.get_warmup_steps(iterations)
    epsilon = optimizer == "adamw" and args.adam_epsilon != ADAM_EPSILON
    return TrainingSettings(
        iterations=iterations,
        optimizer=OptimizerSettings(
            optimizer=optimizer,
            arguments={"eps": args.adam_epsilon} if epsilon else {},
            learning_rate=args.learning_rate,
            weight_decay=args.weight_decay,
            exempt=tuple(sorted(exempt)) if args.weight_decay else (),
            momentum=0.0,
            betas=(args.adam_beta1, args.adam_beta2),
            learning_rate_schedule=schedule.value,
            learning_rate_arguments=args.lr_scheduler_kwargs if isinstance(args.lr_scheduler_kwargs, dict) else {},
            warmup_iterations=warm_up,
            clip_norm=args.max_grad_norm or 0.0,
        ),
        device=args.device.type,
        threads_per_rank=args.threads_per_rank or torch.get_num_threads(),
        timeout_s=args.ddp_timeout,
        precision=precision_of(args),
        tf32=bool(args.tf32),
        compile=bool(args.torch_compile),
        deterministic=args.full_determinism,
        loss_mean=loss_mean,
        loss_scale=FIRST_LOSS_SCALE if args.fp16 else None,
    )
