"""transformers' Trainer whose steps are the iterations of a Plan."""

import copy
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, TrainOutput, denumpify_detensorize

from auto3d.capture.export import InputSpec
from auto3d.capture.model import CapturedModel
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.checkpoint import Checkpoints
from auto3d.runtime.evaluation import evaluate
from auto3d.runtime.executor import IterationResult
from auto3d.runtime.training import Training, naming_this_rank
from auto3d.runtime.waiting import waiting_for
from auto3d.schedule import samples_at_once
from auto3d.trainer.arguments import TrainingArguments, as_one_process
from auto3d.trainer.folders import check_complete, last_complete, load_weights, write_state
from auto3d.trainer.gather import gather
from auto3d.trainer.instance import build_of, state_of
from auto3d.trainer.padding import padding_of
from auto3d.trainer.planned import batch_of, plan_of
from auto3d.trainer.predictions import in_batches, labels_of, mean_loss, output_names
from auto3d.trainer.rank_zero import of_rank_0
from auto3d.trainer.samples import CollatedData, InOrder, TrainOrder
from auto3d.trainer.settings import training_settings
from auto3d.trainer.setup import setup
from auto3d.trainer.supported import check_arguments, check_callbacks, check_overrides, check_trainer

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Trainer(transformers.Trainer):
    """Trains ``model`` by the Plan that ``auto3d.init`` was given, with the arguments and methods of transformers.

    Every process makes it and calls the same methods. Raises InputError, before training starts, for an argument, a
    callback or an overridden method whose meaning cannot hold under pipelining (supported.py).

    While it trains, ``model`` keeps its initial values: the weights are in the pipeline. ``train`` copies them back
    into it at the end, on every rank, unless it is on the meta device.
    """

    args: TrainingArguments
    model: nn.Module

    def __init__(
        self,
        model: nn.Module | None = None,
        args: transformers.TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Callable[..., dict] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: Any = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        check_trainer({name: value for name, value in locals().items() if name not in ("self", "__class__")})
        check_overrides(type(self), Trainer)
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        if not isinstance(args, TrainingArguments):
            raise InputError("Trainer: args is transformers' TrainingArguments; make it by auto3d.TrainingArguments")
        if not isinstance(model, nn.Module):
            raise InputError(f"Trainer: model is a {type(model).__name__}; it takes a torch.nn.Module")
        check_arguments(args)
        check_callbacks(callbacks or ())
        for name, dataset in {"train_dataset": train_dataset, "eval_dataset": eval_dataset}.items():
            parts = dataset.values() if isinstance(dataset, dict) else [dataset]
            if any(part is not None and not hasattr(part, "__len__") for part in parts):
                raise InputError(
                    f"Trainer: {name} has no length, so that ranks could not load different samples of it; give a "
                    "dataset with __len__ and __getitem__"
                )
        if getattr(data_collator, "seed", None) is not None:
            raise InputError(
                "Trainer: data_collator.seed: its own generator would draw other numbers on each rank; leave it out: "
                "the numbers follow from args.seed"
            )
        self._build, self._weights = build_of(model), state_of(model)
        self._batch = batch_of(setup(), args)
        self._training: Training | None = None
        self._planned: tuple[Plan, CapturedModel] | None = None
        self._iterations: Iterator[tuple[int, IterationResult]] = iter(())
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self._train_batch_size = self._batch.micro_batch_size

    @property
    def plan(self) -> Plan | None:
        """The Plan by which it trains; None until the first ``train`` or ``evaluate`` has made it."""
        return None if self._planned is None else self._planned[0]

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, as transformers' method does; all ranks must call it.

        ``resume_from_checkpoint`` is a folder that an earlier training wrote, or True for the last in output_dir.
        """
        if trial is not None:
            raise InputError(
                "Trainer.train: trial: refused: a search of hyperparameters would need a pipeline for each"
            )
        if self.train_dataset is None:
            raise InputError("Trainer.train: there is no train_dataset; give Trainer(train_dataset=)")
        check_callbacks(self.callback_handler.callbacks)
        self.is_in_train = True
        with naming_this_rank():
            result: TrainOutput = self._inner_training_loop(
                args=self.args,
                resume_from_checkpoint=self._folder_to_resume(resume_from_checkpoint),
                ignore_keys_for_eval=ignore_keys_for_eval,
            )
        return result

    def _folder_to_resume(self, given: str | bool | None) -> str | None:
        """The checkpoint from which to train, on which rank 0 decides."""
        if not given:
            return None

        def chosen() -> str:
            return str(
                last_complete(Path(self.args.output_dir or ".")) if given is True else check_complete(Path(given))
            )

        return of_rank_0(chosen, "to say which checkpoint to resume from", timeout_s=self.args.ddp_timeout)

    def hyperparameter_search(self, *arguments: Any, **named: Any) -> Any:
        raise InputError("Trainer.hyperparameter_search: refused: it would need a pipeline for each trial")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights, the config and the tokenizer for ``from_pretrained``. All ranks must call it."""
        folder = output_dir or self.args.output_dir
        if self._weights is not None:
            self._gather()
            super().save_model(folder, _internal_call)
        else:
            self._save(folder, state_dict=self._gathered_state_dict())
        with waiting_for("rank 0 to write the model", self.args.ddp_timeout):
            dist.barrier()

    def _gathered_state_dict(self) -> dict[str, torch.Tensor]:
        """The state dict of a model on the meta device."""
        if self._training is None:
            raise InputError("Trainer.save_model: the model on the meta device has no weights before train()")
        whole: dict[str, torch.Tensor] = {}
        gather(self._training.rank, whole, timeout_s=self.args.ddp_timeout)
        first_name = {id(parameter): name for name, parameter in self.model.named_parameters()}
        entries = self.model.state_dict(keep_vars=True).items()
        return {name: whole[first_name.get(id(tensor), name)] for name, tensor in entries}

    # What transformers' loop calls

    def create_accelerator_and_postprocess(self) -> None:
        with as_one_process():
            super().create_accelerator_and_postprocess()

    def _build_accelerator_args(self, **named: Any) -> dict[str, Any]:
        return {**named, "cpu": True}  # only its data loader is used, for the order of the samples

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        return self._batch.global_batch

    def set_initial_training_values(self, args: transformers.TrainingArguments, dataloader: Any) -> tuple:
        """Those of one process that accumulates as many micro-batches as all pipelines run."""
        alone = copy.copy(args)
        alone.gradient_accumulation_steps = self._micro_batches
        values = super().set_initial_training_values(alone, dataloader)
        self._updates_per_epoch = values[1]
        return values

    @property
    def _micro_batches(self) -> int:
        """Micro-batches of the data loader's size in a global batch, of all pipelines."""
        return self._batch.global_batch // self._batch.micro_batch_size

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        """Build this rank of the pipeline."""
        data = self._train_data(train_dataloader)
        samples = sum(map(len, train_dataloader.batch_sampler))
        missing = -samples % self._batch.global_batch if max_steps >= self._updates_per_epoch else 0
        data.check_fill(missing)
        checkpoints = None
        if resume_from_checkpoint is not None:
            checkpoints = Checkpoints(folder=Path(resume_from_checkpoint), every=None)
        self._training = self._build_training(data, max_steps, checkpoints)
        data.check_fill(missing, self._training.rank.common.terms)
        if self._training.first != self.state.global_step:
            raise InputError(
                f"Trainer.train: resume_from_checkpoint: {resume_from_checkpoint}: its state is after "
                f"{self._training.first} steps, its trainer_state.json after {self.state.global_step}"
            )
        self._iterations = self._training.iterations()
        self._order, self._flos_of_sample = data.order, self._flos_of_one(data.shapes)
        # The pipeline's optimizers follow their own copy of this schedule, which only tells the rate.
        self.lr_scheduler = None
        rate = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=self.args.learning_rate)
        self._rate = self.create_scheduler(max_steps, optimizer=rate)
        rate.step()
        for _ in range(self._training.first):
            self._rate.step()
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _run_epoch(
        self,
        model: nn.Module,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        trial: Any,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        resume_from_checkpoint: str | None,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
    ) -> None:
        """Run the iterations of one epoch, with the events, logs, evaluations and checkpoints of transformers."""
        args, result, learning_rate = self.args, None, None

        def log_save_evaluate() -> None:
            norm = None if result is None else result.grad_norm
            self._maybe_log_save_evaluate(
                self._tr_loss, norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=learning_rate
            )

        for step in range(self.state.global_step - epoch * num_update_steps_per_epoch, num_update_steps_per_epoch):
            self.control = self.callback_handler.on_step_begin(args, self.state, self.control)
            _, result = next(self._iterations)
            self._add_loss(result.loss)
            self.current_flos += self._flos_of_sample * len(self._order.of(self.state.global_step))
            learning_rate = result.learning_rate
            if not result.skipped:
                self._rate.step()
            self.state.global_step += 1
            self.state.epoch = epoch + min((step + 1) * self._micro_batches, steps_in_epoch) / steps_in_epoch
            self.control = self.callback_handler.on_step_end(args, self.state, self.control)
            self._agree()
            log_save_evaluate()
            self._agree()
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        self.control = self.callback_handler.on_epoch_end(args, self.state, self.control)
        self._agree()
        log_save_evaluate()
        self._agree()

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> TrainOutput:
        self._gather()
        return super()._finalize_training(trial, num_train_samples, start_time)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self._training is not None, "checkpoints are written while it trains"
        optimizer = self._settings.optimizer
        write_state(Path(output_dir), self._training, optimizer, self.args.ddp_timeout)

    def _load_best_model(self) -> None:
        assert self._training is not None
        assert self.state.best_model_checkpoint is not None
        load_weights(Path(self.state.best_model_checkpoint), self._training)
        self._gather()

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing: random numbers follow from the seed and the iteration."""

    def _save_scaler(self, output_dir: str) -> None:
        """Nothing: it is part of the ranks' state."""

    # The pipeline

    def _train_data(self, loader: Any) -> CollatedData:
        order = TrainOrder(loader, global_batch=self._batch.global_batch, iterations_per_epoch=self._updates_per_epoch)
        return self._collated(loader, order).with_shapes()

    def _collated(self, loader: Any, order: TrainOrder | InOrder) -> CollatedData:
        return CollatedData(
            dataset=loader.dataset,
            collate=loader.collate_fn,
            order=order,
            padding=padding_of(self.args.sequence_length, self.model, self._tokenizer()),
            seed=self.args.seed,
            label_names=tuple(self.label_names),
        )

    def _build_training(self, data: CollatedData, iterations: int, checkpoints: Checkpoints | None) -> Training:
        """This rank of a pipeline with the weights of the model."""
        self._training, self._iterations = None, iter(())
        gc.collect()  # the stages of an earlier training
        self._inputs = data.shapes
        if self._planned is None:
            self._planned = plan_of(setup(), self.args, self._build, data.shapes)
        plan, captured = self._planned
        decayed = set(self.get_decay_parameter_names(self.model))
        exempt = {name for name, _ in self.model.named_parameters()} - decayed
        self._settings = training_settings(self.args, iterations, exempt)
        return Training(
            captured,
            plan,
            self._settings,
            data,
            setup().world,
            state=self._weights,
            checkpoints=checkpoints,
        )

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate the whole dataset of ``dataloader`` in the pipeline; all ranks must call it."""
        args, samples = self.args, len(dataloader.dataset)
        loss_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        data = self._collated(dataloader, InOrder(samples, self._batch.global_batch)).with_shapes()
        if self._training is None:
            self._training = self._build_training(data, 1, None)
        has_labels = bool(self.label_names) and all(name in data.shapes for name in self.label_names)
        if not has_labels and loss_only:
            raise InputError(
                f"Trainer.evaluate: the samples have no {' and '.join(self.label_names) or 'labels'}, so there is no "
                "loss, and without compute_metrics nothing else to report"
            )
        for name, spec in data.shapes.items():
            if name in self._inputs and self._inputs[name] != spec:
                raise InputError(
                    f"Trainer: {name} of a sample has shape {list(spec.shape)}; the model was captured for "
                    f"{list(self._inputs[name].shape)}: pad all samples to TrainingArguments.sequence_length"
                )
        at_once = samples_at_once(self._training.rank.common.plan)
        whole = -(-samples // at_once) * at_once if has_labels else samples
        data.check_fill(whole - samples, self._training.rank.common.terms)
        names = () if loss_only else self._output_names(ignore_keys)
        result = evaluate(self._training, data, samples=whole, outputs=names, loss=has_labels)
        batch = args.per_device_eval_batch_size

        def read_labels() -> tuple[np.ndarray, ...]:
            return labels_of(data, samples, batch, self.label_names) if has_labels else ()

        labels = of_rank_0(read_labels, "to read the labels", timeout_s=args.ddp_timeout)
        predictions = [result.outputs[name][:samples] for name in names]
        if self.preprocess_logits_for_metrics is not None and predictions:
            if len(predictions) > 1:
                raise InputError(f"Trainer: preprocess_logits_for_metrics takes one output; the model has {names}")
            predictions = [in_batches(self.preprocess_logits_for_metrics, predictions[0], labels or None, batch)]
        self.callback_handler.eval_dataloader = dataloader
        for _ in range(-(-samples // batch)):
            self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)
        arrays = _one_or_tuple([each.numpy() for each in predictions])
        label_ids = _one_or_tuple(labels)
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None and arrays is not None and label_ids is not None:
            compute = self.compute_metrics
            metrics = of_rank_0(
                lambda: denumpify_detensorize(compute(EvalPrediction(predictions=arrays, label_ids=label_ids))),
                "to compute the metrics",
                timeout_s=args.ddp_timeout,
            )
        if has_labels:
            kind = LOSS_MAPPING.get(getattr(self.model, "loss_type", None) or "ForCausalLM")
            metrics["loss"] = mean_loss(
                result.losses,
                at_once,
                batch,
                labels,
                shifted=kind is ForCausalLMLoss,
                finite=args.logging_nan_inf_filter,
            )
        prefix = f"{metric_key_prefix}_"
        metrics = {name if name.startswith(prefix) else prefix + name: value for name, value in metrics.items()}
        return EvalLoopOutput(predictions=arrays, label_ids=label_ids, metrics=metrics, num_samples=samples)

    def _output_names(self, ignored: list[str] | None) -> tuple[str, ...]:
        if ignored is None:
            config = getattr(self.model, "config", None)
            ignored = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        return output_names(self._build, self._inputs, ignored, device=self.args.device.type)

    # Between this rank and the others

    def _add_loss(self, loss: float) -> None:
        """Add the loss of an iteration to the sum since the last log, as transformers does."""
        if self.args.logging_nan_inf_filter and not math.isfinite(loss):
            self._tr_loss += self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        else:
            self._tr_loss += loss

    def _flos_of_one(self, inputs: Mapping[str, InputSpec]) -> int:
        """FLOPs that transformers counts for a sample."""
        batch = {name: torch.empty(1, *spec.shape, device="meta") for name, spec in inputs.items()}
        return int(self.floating_point_ops(batch))

    def _tokenizer(self) -> Any:
        given = self.processing_class
        return given if given is not None else getattr(self.data_collator, "tokenizer", None)

    def _agree(self) -> None:
        """Give all ranks the flags that the user's callbacks have set on any of them."""
        ours = ("transformers", "auto3d")
        if all(type(callback).__module__.split(".")[0] in ours for callback in self.callback_handler.callbacks):
            return  # these decide by what is equal on all ranks
        flags = torch.tensor([int(getattr(self.control, name)) for name in _FLAGS])
        with waiting_for("the callbacks of the other ranks", self.args.ddp_timeout):
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        for name, value in zip(_FLAGS, flags.tolist(), strict=True):
            setattr(self.control, name, bool(value))

    def _gather(self) -> None:
        """Copy the pipeline's weights into the model, on every rank."""
        if self._training is not None and self._weights is not None:
            gather(self._training.rank, self._weights, timeout_s=self.args.ddp_timeout)


def _one_or_tuple(arrays: Sequence[np.ndarray]) -> Any:
    """As transformers returns predictions and labels."""
    return (arrays[0] if len(arrays) == 1 else tuple(arrays)) if arrays else None
