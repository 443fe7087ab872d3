"""What each argument of transformers' TrainingArguments and Trainer means here: honoured, without effect, or refused.

A test compares the tables with the installed transformers, so that no argument can be passed over in silence.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import TrainerCallback

from auto3d.errors import InputError


@dataclass(frozen=True)
class Honoured:
    """The argument has its meaning, for the values of ``only`` (None: for all)."""

    only: tuple[Any, ...] | None = None
    otherwise: str = ""  # why not for others, and what to do


@dataclass(frozen=True)
class WithoutEffect:
    """The argument changes no number, because of what ``why`` says."""

    why: str


@dataclass(frozen=True)
class Refused:
    """Anything but ``accepted`` is refused."""

    why: str  # and what to do
    accepted: tuple[Any, ...] = (None, False)


Decision = Honoured | WithoutEffect | Refused

_HUB = Refused("upload the folder that save_model() writes")
_DDP = Refused("gradients are summed by auto3d's own buckets")
_SHARDS = Refused("auto3d.init(dp=, tp=, pp=, shard_optimizer=True) says how the model is divided")
_LOADER = WithoutEffect("batches come in order, and a GPU's rank reads ahead into pinned memory in a thread")
_CHECKPOINTING = Honoured()
_RECOMPUTED = Refused(
    "auto3d.init(recompute=) says how much of a stage is recomputed", (None, {}, {"use_reentrant": False})
)
_FULL_EVAL = Refused("evaluation runs in the precision of the training")

ARGUMENTS: Mapping[str, Decision] = {
    "output_dir": Honoured(),
    "per_device_train_batch_size": Honoured(),
    "num_train_epochs": Honoured(),
    "max_steps": Honoured(),
    "learning_rate": Honoured(),
    "lr_scheduler_type": Honoured(),
    "lr_scheduler_kwargs": Honoured(),
    "warmup_steps": Honoured(),
    "optim": Honoured(
        (
            *("adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "adagrad", "rmsprop"),
            *("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"),
        ),
        "give others by Trainer(optimizers=) or Trainer(optimizer_cls_and_kwargs=)",
    ),
    "optim_args": Honoured(),
    "weight_decay": Honoured(),
    "adam_beta1": Honoured(),
    "adam_beta2": Honoured(),
    "adam_epsilon": Honoured(),
    "optim_target_modules": Refused("it belongs to optimizers that auto3d does not have"),
    "gradient_accumulation_steps": Honoured(),
    "average_tokens_across_devices": Refused("a loss is the mean over the real targets of the whole batch", (True,)),
    "max_grad_norm": Honoured(),
    "label_smoothing_factor": Honoured(),
    "bf16": Honoured(),
    "fp16": Honoured(),
    "bf16_full_eval": _FULL_EVAL,
    "fp16_full_eval": _FULL_EVAL,
    "tf32": Honoured(),
    "activation_checkpointing": _CHECKPOINTING,  # the same: auto3d.init(recompute="full")
    "activation_checkpointing_kwargs": _RECOMPUTED,
    "gradient_checkpointing": _CHECKPOINTING,
    "gradient_checkpointing_kwargs": _RECOMPUTED,
    "torch_compile": Honoured(),
    "torch_compile_backend": Refused("the stages are compiled by inductor", (None, "inductor")),
    "torch_compile_mode": Refused("the stages are compiled in inductor's default mode", (None, "default")),
    "use_liger_kernel": Refused("its kernels cannot be captured"),
    "liger_kernel_config": Refused("its kernels cannot be captured"),
    "use_cache": Refused("training needs no past keys and values"),
    "neftune_noise_alpha": Refused("its hook draws noise that the first stage and its recomputation would not share"),
    "torch_empty_cache_steps": WithoutEffect("the stages reuse their memory"),
    "auto_find_batch_size": Refused("the estimate of memory comes before training; see auto3d.Planner"),
    "logging_strategy": Honoured(),
    "logging_steps": Honoured(),
    "logging_first_step": Honoured(),
    "log_on_each_node": Honoured(),
    "logging_nan_inf_filter": Honoured(),
    "include_num_input_tokens_seen": Refused("tokens are not counted", ("no", False)),
    "log_level": Honoured(),
    "log_level_replica": Honoured(),
    "disable_tqdm": Honoured(),
    "report_to": Honoured(),
    "run_name": Honoured(),
    "project": Honoured(),
    "trackio_space_id": Honoured(),
    "trackio_bucket_id": Honoured(),
    "trackio_static_space_id": Honoured(),
    "eval_strategy": Honoured(),
    "eval_steps": Honoured(),
    "eval_delay": Honoured(),
    "per_device_eval_batch_size": Honoured(),
    "prediction_loss_only": Honoured(),
    "eval_on_start": Honoured(),
    "eval_do_concat_batches": Refused("predictions are one array for all samples", (True,)),
    "eval_use_gather_object": Refused("predictions are tensors"),
    "eval_accumulation_steps": WithoutEffect("predictions go to the host at once"),
    "include_for_metrics": Honoured(),
    "batch_eval_metrics": Honoured(),
    "save_only_model": Honoured(),
    "save_strategy": Honoured(),
    "save_steps": Honoured(),
    "save_on_each_node": Refused("all ranks write one checkpoint, to a folder that all nodes see"),
    "save_total_limit": Honoured(),
    "enable_jit_checkpoint": Refused("a checkpoint takes all ranks, at a moment on which they agree"),
    "push_to_hub": _HUB,
    "hub_token": WithoutEffect("push_to_hub is refused"),
    "hub_private_repo": WithoutEffect("push_to_hub is refused"),
    "hub_model_id": WithoutEffect("push_to_hub is refused"),
    "hub_strategy": WithoutEffect("push_to_hub is refused"),
    "hub_always_push": WithoutEffect("push_to_hub is refused"),
    "hub_revision": WithoutEffect("push_to_hub is refused"),
    "load_best_model_at_end": Honoured(),
    "metric_for_best_model": Honoured(),
    "greater_is_better": Honoured(),
    "ignore_data_skip": Refused("a resumed training goes on with the next samples"),
    "restore_callback_states_from_checkpoint": Honoured(),
    "full_determinism": Honoured(),
    "seed": Honoured(),
    "data_seed": Honoured(),
    "use_cpu": Honoured(),
    "accelerator_config": Honoured(),  # its fields: ACCELERATOR
    "parallelism_config": _SHARDS,
    "dataloader_drop_last": Honoured(),
    "dataloader_num_workers": Honoured(),
    "dataloader_pin_memory": _LOADER,
    "dataloader_persistent_workers": WithoutEffect(
        "workers begin anew in each epoch; refused where data or the sampler draw, as these would draw on"
    ),
    "dataloader_prefetch_factor": Honoured(),
    "dataloader_multiprocessing_context": Refused("workers take the dataset as it is in the rank", (None, "fork")),
    "dataloader_in_order": _LOADER,
    "remove_unused_columns": Honoured(),
    "label_names": Honoured(),
    "train_sampling_strategy": Honoured(
        ("random", "sequential", "group_by_length"), "ranks have equally many samples, whose tokens are not balanced"
    ),
    "length_column_name": Honoured(),
    "ddp_find_unused_parameters": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": _DDP,
    "ddp_backend": Refused("gloo connects CPUs and NCCL connects GPUs", (None, "nccl", "gloo")),
    "ddp_timeout": Honoured(),
    "fsdp": Refused(_SHARDS.why, (None, False, "", [])),
    "fsdp_config": Refused(_SHARDS.why, (None, {})),
    "deepspeed": _SHARDS,
    "debug": Refused("its hooks watch modules, and the stages run captured programs", ("", [], None)),
    "skip_memory_metrics": Refused("each rank reports its peak memory itself", (True,)),
    "do_train": Honoured(),
    "do_eval": Honoured(),
    "do_predict": Honoured(),
    "resume_from_checkpoint": Honoured(),
    "local_rank": WithoutEffect("the launcher's environment says it"),
}
"""Every field of TrainingArguments."""

ACCELERATOR: Mapping[str, Decision] = {
    "split_batches": Refused("the batch sizes of TrainingArguments are those of a micro-batch"),
    "dispatch_batches": Refused("each rank loads what its stages read"),
    "even_batches": WithoutEffect("no sample is trained twice to fill a batch"),
    "use_seedable_sampler": Refused("all ranks draw the same order of samples from the seed", (True,)),
    "non_blocking": WithoutEffect("copies to a GPU never block"),
    "gradient_accumulation_kwargs": Refused("gradient_accumulation_steps says it"),
    "use_configured_state": Refused("auto3d.init describes the processes"),
}
"""Every field of accelerator_config."""

_HONOURED = (
    *("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "compute_loss_func"),
    *("compute_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics"),
)
TRAINER: Mapping[str, Decision] = {**dict.fromkeys(_HONOURED, Honoured()), "model_init": Refused("pass model=")}
"""Every argument of Trainer."""

METHODS = frozenset(
    {"add_callback", "evaluate", "is_local_process_zero", "is_world_process_zero", "log", "pop_callback", "predict"}
    | {"remove_callback", "save_model", "train", "_get_train_sampler", "get_decay_parameter_names"}
    | {"compute_loss", "loss_is_scaled_for_ga", "create_optimizer", "create_scheduler"}
    | {"get_optimizer_cls_and_kwargs", "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"}
)
"""Methods of Trainer that a subclass may override. Any other would not be called, or not where transformers does."""

_MAY_OVERRIDE = f"a subclass of auto3d.Trainer may override {', '.join(sorted(METHODS))}"

EVENTS = frozenset(
    {"on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_step_end"}
    | {"on_evaluate", "on_predict", "on_prediction_step", "on_save", "on_log", "on_push_begin"}
)
"""Events that callbacks receive. The others lie inside a step, which all ranks take together."""


def check_arguments(args: Any) -> None:
    """Raise InputError for the first argument whose meaning cannot hold under pipelining."""
    _check("TrainingArguments", ARGUMENTS, vars(args))
    _check("TrainingArguments.accelerator_config", ACCELERATOR, vars(args.accelerator_config))
    if args.batch_eval_metrics and args.include_for_metrics:
        raise InputError(
            f"TrainingArguments.include_for_metrics: found {args.include_for_metrics} with batch_eval_metrics, where "
            "transformers gives all inputs of a batch and not the main one; leave out one of the two"
        )


def check_trainer(given: Mapping[str, Any]) -> None:
    """The same for the arguments of Trainer."""
    _check("Trainer", TRAINER, given)


def check_overrides(kind: type, base: type) -> None:
    """Raise InputError if ``kind``, a subclass of ``base``, overrides a method that is not called here."""
    for name in dir(transformers.Trainer):
        if getattr(kind, name) is not getattr(base, name, None) and name not in METHODS and not name.startswith("__"):
            raise InputError(
                f"{kind.__name__}.{name}: refused: it overrides a method that a pipeline cannot call; {_MAY_OVERRIDE}"
            )


def check_attributes(trainer: Any, made_with: Mapping[str, Any]) -> None:
    """Raise InputError for what a script has put into ``trainer`` and a pipeline would not use.

    ``made_with`` has attributes with the values that the trainer was made with.
    """
    for name in vars(trainer):
        if callable(getattr(transformers.Trainer, name, None)):
            raise InputError(
                f"Trainer.{name}: refused: it was set on the trainer, and a pipeline cannot call it; {_MAY_OVERRIDE}"
            )
    for name, value in made_with.items():
        if getattr(trainer, name) is not value:
            raise InputError(f"Trainer.{name}: refused: it was set on the trainer; say it where the Trainer is made")


def own_events(kind: type) -> list[str]:
    """The events for which the callbacks of class ``kind`` have a method of their own."""
    events = {name: method for name, method in vars(TrainerCallback).items() if name.startswith("on_")}
    return [name for name, method in events.items() if getattr(kind, name, method) is not method]


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Raise InputError for a callback that waits for an event which does not occur here."""
    for callback in callbacks:
        kind = callback if isinstance(callback, type) else type(callback)
        for name in own_events(kind):
            if name not in EVENTS:
                raise InputError(
                    f"callbacks: {kind.__name__}.{name}: refused: it lies inside a step, which all ranks take "
                    f"together; a callback may have {', '.join(sorted(EVENTS))}"
                )


def _check(where: str, table: Mapping[str, Decision], given: Mapping[str, Any]) -> None:
    for name, decision in table.items():
        if name not in given:
            continue
        value = given[name]
        if isinstance(decision, Refused) and value not in decision.accepted:
            _refuse(f"{where}.{name}", value, decision.accepted[-1:], decision.why)
        if isinstance(decision, Honoured) and decision.only is not None and value not in decision.only:
            _refuse(f"{where}.{name}", value, decision.only, decision.otherwise)


def _refuse(where: str, value: Any, accepted: tuple[Any, ...], why: str) -> None:
    shown = repr(getattr(value, "value", value))
    shown = shown if len(shown) < 60 else type(value).__name__
    raise InputError(f"{where}: found {shown}; it takes {', '.join(map(repr, accepted))}: {why}")
