"""TrainingArguments as the settings of a training."""

import torch

from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.trainer.arguments import TrainingArguments

FIRST_LOSS_SCALE = 65536.0  # the default of torch.amp.GradScaler


def precision_of(args: TrainingArguments) -> str:
    """The precision of autocast."""
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"


def training_settings(
    args: TrainingArguments, iterations: int, optimizer: OptimizerSettings, loss_mean: str
) -> TrainingSettings:
    """The settings of a training of ``iterations`` steps; supported.py has refused what they cannot express."""
    return TrainingSettings(
        iterations=iterations,
        optimizer=optimizer,
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
