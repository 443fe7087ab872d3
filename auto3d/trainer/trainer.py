"""transformers' Trainer whose steps are the iterations of a Plan."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.data_loader import DataLoaderShard
from accelerate.state import PartialState
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from auto3d.capture.export import InputSpec
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.checkpoint.format import Checkpoints
from auto3d.runtime.executor import IterationResult
from auto3d.runtime.messages.gathered import of_all_ranks
from auto3d.runtime.optimizer.classes import averages, check_resumes
from auto3d.runtime.settings import SUMMED_ITEMS
from auto3d.runtime.training import Training, naming_this_rank
from auto3d.trainer.arguments import TrainingArguments, as_one_process
from auto3d.trainer.callbacks import PipelineCallbacks, is_users
from auto3d.trainer.checks import check_same_data, check_samples
from auto3d.trainer.draws import EvaluationDraws
from auto3d.trainer.evaluation import Evaluation, check_evaluation, evaluated, metrics_of
from auto3d.trainer.folders import folder_to_resume, load_weights, write_state
from auto3d.trainer.generators import PROCESS
from auto3d.trainer.instance import kept_by_forward, separate
from auto3d.trainer.loaders import LoadedSamples, check_loader
from auto3d.trainer.looks import check_names_none, may_look, own_methods
from auto3d.trainer.loss_mean import loss_mean_of
from auto3d.trainer.optimizer import KEPT, StateOnRanks, take_thawed
from auto3d.trainer.own_loss import SMOOTHING, ComputeLoss
from auto3d.trainer.pipeline import Pipeline
from auto3d.trainer.predictions import stand_in_labels
from auto3d.trainer.rank_zero import of_rank_0, tell
from auto3d.trainer.rates import check_rates, check_saved, follows_metric, load_rates, write_rates
from auto3d.trainer.samples import CollatedData, InOrder, samples_of
from auto3d.trainer.sequence import InSequence
from auto3d.trainer.stream import Stream, check_readable, check_stream, is_stream, read_whole
from auto3d.trainer.supported import check_arguments, check_attributes, check_callbacks, check_overrides, check_trainer
from auto3d.trainer.together import TOGETHER
from auto3d.trainer.watching import ReadsWatch


class Trainer(transformers.Trainer):
    """Trains ``model`` by the Plan that ``auto3d.init`` was given, with the arguments and methods of transformers.

    Every process makes it and calls the same methods. Raises InputError, before training starts, for an argument, a
    callback or an overridden method whose meaning cannot hold under pipelining (supported.py).

    While it trains, the weights are in the pipeline: ``model`` has them in the events of callbacks that look at it, and
    after ``train``, on every rank, unless it is on the meta device.
    """

    args: TrainingArguments
    model: nn.Module
    callback_handler: PipelineCallbacks  # another CallbackHandler until the first training
    optimizer: Any  # None until the first training
    lr_scheduler: Any  # likewise

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
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        check_trainer(given)
        check_overrides(type(self), Trainer)
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        if not isinstance(args, TrainingArguments):
            raise InputError("Trainer: args is transformers' TrainingArguments; make it by auto3d.TrainingArguments")
        if not isinstance(model, nn.Module):
            raise InputError(f"Trainer: model is a {type(model).__name__}; it takes a torch.nn.Module")
        if isinstance(model, OptimizedModule):  # torch.compile made it; torch_compile=True compiles the stages
            model = model._orig_mod
        check_arguments(args)
        check_callbacks(callbacks or ())
        check_readable(train_dataset, "train_dataset")
        check_readable(eval_dataset, "eval_dataset")
        if is_stream(train_dataset):
            check_stream(train_dataset, args)
        self._pipeline = Pipeline(model, args)
        self._between_steps = False
        self._samples, self._sequence = LoadedSamples(self, self._pipeline), InSequence(self._pipeline)
        self._first_item: int | None = None  # see CollatedData
        self._has_told_of_values = False  # see _follow_values
        self._stands_in = False  # whether the pipeline was made for labels that stand in, since samples had none
        self._iterations: Iterator[tuple[int, IterationResult]] = iter(())
        self._watch: ReadsWatch  # watches the training that runs
        self._made_of: tuple[Any, dict[str, Any]] = None, {}  # an optimizer of transformers, and arguments for it
        self._frozen: list[nn.Parameter] = []  # parameters that were frozen when transformers made it
        super().__init__(**{**given, "model": model, "args": args, "model_init": None})
        self._train_batch_size = self._pipeline.batch.micro_batch_size
        self._made_with = {name: getattr(self, name) for name in ("compute_loss_func", "label_smoother")}
        losses = {
            "compute_loss": type(self).compute_loss is not transformers.Trainer.compute_loss,
            "compute_loss_func": compute_loss_func is not None,
            SMOOTHING: self.label_smoother is not None,  # transformers smooths no labels of several classes at once
        }
        if own := [name for name, is_own in losses.items() if is_own]:
            self._pipeline.compute(ComputeLoss(self.compute_loss, own[0]))

    @property
    def plan(self) -> Plan | None:
        """The Plan by which it trains; None until the first ``train`` or ``evaluate`` has made it."""
        return self._pipeline.plan

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
        data: Any = self.train_dataset
        if data is None and not self._makes_loader:
            raise InputError("Trainer.train: there is no train_dataset; give Trainer(train_dataset=)")
        if hasattr(data, "__len__") and not len(data):
            raise InputError("train_dataset: it has no samples; look at what selects or filters them")
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise InputError(
                "Trainer.train: no parameter of the model requires a gradient, so there is nothing to train; set "
                "requires_grad of those to train"
            )
        check_callbacks(self.callback_handler.callbacks)
        check_attributes(self, self._made_with)
        self._pipeline.check_batch()
        TOGETHER.call("Trainer.train", self.args.ddp_timeout)
        schedules = self._created_lr_scheduler and type(self).create_scheduler is transformers.Trainer.create_scheduler
        self.is_in_train = True
        try:
            with naming_this_rank():
                handler = PipelineCallbacks(self.callback_handler, self._pipeline, self._start_again)
                handler.compare(own_methods(type(self)), schedules=schedules)
                self.callback_handler = handler
                result: TrainOutput = self._inner_training_loop(
                    args=self.args,
                    resume_from_checkpoint=folder_to_resume(resume_from_checkpoint, self.args.output_dir or "."),
                    ignore_keys_for_eval=ignore_keys_for_eval,
                )
        finally:
            self._sequence.end()
            self.is_in_train = False  # also after Ctrl-C, after which the script may evaluate, save or end
        return result

    def hyperparameter_search(self, *arguments: Any, **named: Any) -> Any:
        raise InputError("Trainer.hyperparameter_search: refused: it would need a pipeline for each trial")

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        raise InputError(
            "Trainer.training_step: refused: this process alone has no step; train() makes those of all ranks"
        )

    def prediction_step(self, *arguments: Any, **named: Any) -> Any:
        raise InputError(
            "Trainer.prediction_step: refused: it would run in this process alone; use predict() on all ranks"
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights, the config and the tokenizer for ``from_pretrained``. All ranks must call it."""
        TOGETHER.call("Trainer.save_model", self.args.ddp_timeout)
        folder = output_dir or self.args.output_dir
        if self._pipeline.on_meta:
            write = partial(self._save, folder, state_dict=self._pipeline.state_dict())
        else:
            self._pipeline.gather()
            write = partial(super().save_model, folder, _internal_call)
        if dist.get_rank():
            write()
        of_rank_0(write, "to write the model")

    def end(self) -> None:
        """Finish the trackers and leave the other ranks, at the end of a script. All ranks must call it."""
        if self.is_in_train:
            raise InputError(
                "Trainer.end: refused while it trains: it would close the connections that the next step needs; call "
                "it at the end of the script"
            )
        TOGETHER.call("Trainer.end", self.args.ddp_timeout)
        super().end()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Write the weights; of a module that cannot write itself, also those that share memory or are views."""
        if state_dict is None and not hasattr(self.model, "save_pretrained"):
            state_dict = separate(self.model.state_dict())
        super()._save(output_dir, state_dict)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        asked: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(asked, str):  # the name of one of several
            asked = self.eval_dataset[asked]  # type: ignore[index]  # transformers has checked that they have names
        if is_stream(asked):
            eval_dataset = read_whole(asked, self.args.seed)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        if is_stream(test_dataset):
            test_dataset = read_whole(test_dataset, self.args.seed)
        return super().get_test_dataloader(test_dataset)

    # What transformers' loop calls

    def create_accelerator_and_postprocess(self) -> None:
        with as_one_process():
            super().create_accelerator_and_postprocess()
        state = PartialState()  # a script asks it whether its rank is the main process
        state.process_index, state.local_process_index = self.args.process_index, self.args.local_process_index

    def _build_accelerator_args(self, **named: Any) -> dict[str, Any]:
        return {**named, "cpu": True}  # only its data loader is used, for the order of the samples

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The sampler of one process with the same global batch, by which samples may be grouped."""
        args, self.args = self.args, copy.copy(self.args)
        self.args.per_device_train_batch_size = self._pipeline.batch.micro_batch_size
        self.args.gradient_accumulation_steps = self._micro_batches
        try:
            return super()._get_train_sampler(train_dataset)
        finally:
            self.args = args

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        return self._pipeline.batch.global_batch

    def set_initial_training_values(self, args: transformers.TrainingArguments, dataloader: Any) -> tuple:
        """The values of one process that accumulates as many micro-batches as all pipelines run."""
        if self._makes_loader:
            size = self._pipeline.batch.micro_batch_size
            check_loader(dataloader, "get_train_dataloader", size, "TrainingArguments.per_device_train_batch_size")
        alone = copy.copy(args)
        alone.gradient_accumulation_steps = self._micro_batches
        values = super().set_initial_training_values(alone, dataloader)
        self._sequence.begin(dataloader, self.args, values[1])
        return values

    @property
    def _makes_loader(self) -> bool:
        """Whether the script itself makes the DataLoader of the training."""
        return type(self).get_train_dataloader is not transformers.Trainer.get_train_dataloader

    def _init_training_state(self, *arguments: Any, **named: Any) -> tuple[int, int]:
        """Begin at the state of the checkpoint, if there is one, which may be in a later epoch of a stream."""
        epochs, steps = super()._init_training_state(*arguments, **named)
        if isinstance(order := self._sequence.order, Stream):
            order.forget(self.state.global_step)
            epochs, _ = order.place(self.state.global_step)
        return epochs, steps

    @property
    def _micro_batches(self) -> int:
        """Micro-batches of the data loader's size in a global batch, of all pipelines."""
        return self._pipeline.batch.global_batch // self._pipeline.batch.micro_batch_size

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        """Build this rank of the pipeline."""
        if max_steps < 1:
            raise InputError(
                f"TrainingArguments: with num_train_epochs={self.args.num_train_epochs:g} and max_steps="
                f"{self.args.max_steps} there is no step to train; give more, or leave out train()"
            )
        folder = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
        others, order = self._loaders_of_evaluations, self._sequence.order
        data = self._samples.of_training(train_dataloader, others, order, max_steps)
        checkpoints = None if folder is None else Checkpoints(folder=folder, every=None)
        self._create_optimizer_and_scheduler(max_steps)
        generator = train_dataloader.generator if self._makes_loader else None
        data = self._sequence.training(data, generator=generator, folder=folder, step=self.state.global_step)
        training = self._start(data, max_steps, checkpoints)
        if self.args.save_strategy != "no":
            check_resumes(training.rank.common.rules.values())
            check_saved(self.lr_scheduler)
        if training.first != self.state.global_step:
            raise InputError(
                f"Trainer.train: resume_from_checkpoint: {resume_from_checkpoint}: its state is after "
                f"{training.first} steps, its trainer_state.json after {self.state.global_step}"
            )
        self._samples.tell_length()
        self._check_evaluations()
        self._check_reads(data)
        self._data, self._max_steps = data, max_steps
        self._go_through(training)
        self._sequence.note(data, training.rank.common.plan.micro_batch_size)
        sample = {name: torch.empty(1, *spec.shape, device="meta") for name, spec in data.shapes.items()}
        self._flos_of_sample = int(self.floating_point_ops(sample))
        if folder is not None:
            load_rates(folder, self.optimizer, self.lr_scheduler, steps=training.first)
        self.callback_handler.model = self.model
        self.callback_handler.optimizer, self.callback_handler.lr_scheduler = self.optimizer, self.lr_scheduler
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _create_optimizer_and_scheduler(self, max_steps: int) -> None:
        """Make them as transformers or the script does; an optimizer of an earlier training goes on.

        Ranks make their own optimizers, which follow the groups of this one (optimizer.py).
        """
        if self._created_lr_scheduler:  # for another number of steps
            self.lr_scheduler, self._created_lr_scheduler = None, False
        before_it = self.optimizer
        self.create_optimizer()
        makes_own = type(self).create_optimizer is not transformers.Trainer.create_optimizer
        if before_it is None and not makes_own and not self.optimizer_cls_and_kwargs:  # it follows from the arguments
            self._made_of = self.optimizer, {name: getattr(self.args, name) for name in KEPT}
            self._frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        made, arguments = self._made_of
        for name, before in arguments.items() if made is self.optimizer else ():
            if (value := getattr(self.args, name)) != before:
                raise InputError(
                    f"TrainingArguments.{name}: it was {before!r} in the training before, and is {value!r}; the "
                    "optimizer goes on, and keeps it: make a new Trainer, or set it back"
                )
        self._pipeline.check_optimizer(self.optimizer)
        if not isinstance(self.optimizer.state, StateOnRanks):
            self.optimizer.state = StateOnRanks()
        if averages(type(self.optimizer)):
            self.optimizer.eval = partial(self._use_weights, "eval", evaluation=True)
            self.optimizer.train = partial(self._use_weights, "train", evaluation=False)
        self.create_scheduler(max_steps)
        check_rates(self.optimizer, self.lr_scheduler)
        # torch warns of a schedule whose optimizer makes no step; this one makes none, and the ranks' do.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)

    def _use_weights(self, called: str, *, evaluation: bool) -> None:
        """What a script's call of ``optimizer.eval()`` or ``optimizer.train()`` does; all ranks must call it."""
        TOGETHER.call(f"Trainer.optimizer.{called}", self.args.ddp_timeout)
        if self._pipeline.training is not None:
            self._pipeline.use_weights(evaluation=evaluation)
            self._pipeline.gather()

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: transformers.TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        kind, arguments = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        return kind, {name: value for name, value in arguments.items() if name != "fused"}  # the device decides

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
        if self.state.global_step >= self._max_steps:  # transformers would make one step more
            tell(f"{resume_from_checkpoint}: all {self._max_steps} steps are done; none is left")
            self.control.should_training_stop = True
            return

        def log_evaluate_save() -> None:
            norm = None if result is None else result.grad_norm
            TOGETHER.mark(f"goes on after step {self.state.global_step}")
            self.callback_handler.agree(self.control, self.optimizer)
            # ``log`` and ``_evaluate`` agree once more, because their callbacks may ask for the next.
            self._between_steps = True
            if self.callback_handler.any_looks and (
                self.control.should_log or self.control.should_evaluate or self.control.should_save
            ):
                self._pipeline.gather()
            self._maybe_log_save_evaluate(
                self._tr_loss, norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=learning_rate
            )
            self._between_steps = False
            self.callback_handler.agree(self.control, self.optimizer)

        order, is_streamed = self._sequence.order, isinstance(self._sequence.order, Stream)
        done, first = self.state.global_step, 0
        if resume_from_checkpoint is not None and epoch == epochs_trained:
            first = order.place(done)[1] if is_streamed else done % num_update_steps_per_epoch
        if order.place(done) != (epoch, first):  # a callback has ended the epoch before it
            self._sequence.begin_epoch(epoch, first, done)
            self._start_again()
        for step in range(first, num_update_steps_per_epoch):
            self.control = self.callback_handler.on_step_begin(args, self.state, self.control)
            self.callback_handler.agree(self.control, self.optimizer)
            # transformers looks at these flags after each micro-batch: before the step, if there are several.
            if self._is_stopped and self._micro_batches_of(step, steps_in_epoch) > 1:
                break
            self._sequence.follow(self.state.global_step, begins_epoch=step == first)
            self.current_gradient_accumulation_steps = self._micro_batches_of(step, steps_in_epoch)
            self._follow_values()
            TOGETHER.mark(f"goes on with step {self.state.global_step + 1}")
            self.model.train()  # a callback may have called eval() for a sample of text, say
            if not self.callback_handler.ranks_agree and self._pipeline.is_outdated:
                raise InputError(
                    "Trainer: the model was changed during the training, outside of an event of a callback; change it "
                    "in one"
                )
            if any(parameter.grad is not None for parameter in self.model.parameters()):
                raise InputError(
                    "Trainer: the model has gradients between two steps, which one process would add to those of the "
                    "next: call model.zero_grad() where they were computed"
                )
            if self.state.global_step >= self._max_steps:
                raise InputError(
                    f"Trainer: a callback lets the training go on after its last step, {self._max_steps} (by "
                    "state.max_steps or control.should_training_stop), for which the pipeline was made; set "
                    "TrainingArguments.max_steps"
                )
            self._pipeline.follow(self.optimizer)
            if isinstance(order, Stream):
                order.forget(self.state.global_step)
            _, result = next(self._iterations)
            self._watch.after_step()
            self._pipeline.trained()
            self._add_loss(result.loss)
            self.current_flos += self._flos_of_sample * len(order.of(self.state.global_step))
            learning_rate = self._get_learning_rate()
            if not result.skipped and not follows_metric(self.lr_scheduler):
                self.lr_scheduler.step()
            self.state.global_step += 1
            self.state.epoch = epoch + min((step + 1) * self._micro_batches, steps_in_epoch) / steps_in_epoch
            self.control = self.callback_handler.on_step_end(args, self.state, self.control)
            log_evaluate_save()
            if self._is_stopped or (is_streamed and self._ends_epoch(epoch)):
                break
        self.control = self.callback_handler.on_epoch_end(args, self.state, self.control)
        log_evaluate_save()

    def _ends_epoch(self, epoch: int) -> bool:
        """Whether the next step, if there is one, belongs to another epoch."""
        done = self.state.global_step
        return done < self._max_steps and self._sequence.order.place(done)[0] != epoch

    def _follow_values(self) -> None:
        """Build the pipeline again if the code of its stages would read other values beside the model."""
        place = self._pipeline.value_changed
        if place and not self._has_told_of_values:
            self._has_told_of_values = True
            tell(
                f"{place} has changed, and the code of the model or its loss may read it: the pipeline is built again, "
                "here and whenever such a value changes; a number that changes often may be a buffer of the model, "
                "which a callback sets"
            )
        if place:
            self._start_again()

    @property
    def _is_stopped(self) -> bool:
        return bool(self.control.should_epoch_stop or self.control.should_training_stop)

    def _micro_batches_of(self, step: int, steps_in_epoch: int) -> int:
        """Micro-batches of a step of an epoch of this many micro-batches."""
        return min(self._micro_batches, steps_in_epoch - step * self._micro_batches)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if self._between_steps:
            self.callback_handler.agree(self.control, self.optimizer)

    def _evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        metrics: dict[str, float] = super()._evaluate(*arguments, **named)
        self.callback_handler.agree(self.control, self.optimizer)
        return metrics

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> TrainOutput:
        self._pipeline.gather()
        self._sequence.finish(self.state.global_step)
        return super()._finalize_training(trial, num_train_samples, start_time)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        write_state(Path(output_dir), self._pipeline)
        of_rank_0(
            lambda: write_rates(Path(output_dir), self.optimizer, self.lr_scheduler), "to write the learning rates"
        )

    def _load_best_model(self) -> None:
        assert self._pipeline.training is not None
        assert self.state.best_model_checkpoint is not None
        load_weights(Path(self.state.best_model_checkpoint), self._pipeline.training)
        self._pipeline.trained()
        self._pipeline.gather()

    def _save_rng_state(self, output_dir: str) -> None:
        self._sequence.write(Path(output_dir), self.state.global_step)

    def _save_scaler(self, output_dir: str) -> None:
        """Nothing: it is part of the ranks' state."""

    # The pipeline

    def _start_again(self) -> None:
        """Go on with the model as a callback has changed it, after the steps so far."""
        self._go_through(self._start(self._data, self._max_steps, None, goes_on=True))

    def _go_through(self, training: Training) -> None:
        """Let the next steps be the iterations of ``training``."""
        assert self.plan is not None
        self._iterations = training.iterations()
        self._watch = ReadsWatch(training, self.plan, self._pipeline.settings.device)

    def _start(
        self, data: CollatedData, iterations: int, checkpoints: Checkpoints | None, *, goes_on: bool = False
    ) -> Training:
        """This rank of a pipeline with the weights of the model; if it ``goes_on``, after the steps so far."""
        self._iterations = iter(())
        with self._tracing():
            labels: dict[str, InputSpec] = {}
            if data.lacks_labels and not self.is_in_train:  # the script only predicts
                labels = stand_in_labels(
                    self._pipeline.build, data.shapes, data.label_names, device=self.args.device.type
                )
            self._stands_in = bool(labels)
            start = partial(
                self._pipeline.start,
                iterations=iterations,
                optimizer=self.optimizer if self.is_in_train else self._pipeline.learnt_by,
                checkpoints=checkpoints,
            )
            if self._stands_in:
                shapes = {**data.shapes, **labels}
                return start(replace(data, shapes=shapes), loss_mean="micro-batches", gets_items=False)
            takes_items = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
            gives_items = takes_items and "labels" in data.shapes and not self.args.loss_mean
            loss_mean = self.args.loss_mean or loss_mean_of(
                self._pipeline.build,
                data.shapes,
                gives_items=gives_items,
                is_scaled=self.loss_is_scaled_for_ga,
                device=self.args.device.type,
            )
            self._first_item = int(self._loss_shifts_labels) if loss_mean in ("items", SUMMED_ITEMS) else None
            if self.is_in_train and self._frozen and self._made_of[0] is self.optimizer:
                decayed = self.get_decay_parameter_names(self.model)
                take_thawed(self.optimizer, self.model, self._frozen, decayed)
            gets_items = gives_items and loss_mean != "items"  # there the model divides, as the data says
            data = replace(data, first_item=self._first_item)
            return start(data, loss_mean=loss_mean, gets_items=gets_items, goes_on=goes_on)

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        """Inside, code of the stages is traced. Raises InputError for what it would do in one process only."""
        logs = len(self.state.log_history)
        with self._pipeline.tracing():
            yield
        if len(self.state.log_history) != logs:
            raise InputError(
                "Trainer.compute_loss: it logs, and runs only when the stages are made, not in each step: log in a "
                "callback or in a method log()"
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
        TOGETHER.call(f"Trainer.{'predict' if description == 'Prediction' else 'evaluate'}", self.args.ddp_timeout)
        predicts = description == "Prediction"
        self._check_loader_of_evaluation(dataloader, "get_test_dataloader" if predicts else "get_eval_dataloader")
        args, samples = self.args, samples_of(dataloader.batch_sampler)
        check_attributes(self, self._made_with)
        data = self._samples.of_evaluation(dataloader)
        needs_labels = self._stands_in and not data.lacks_labels
        is_other = self._pipeline.is_outdated or needs_labels or self._pipeline.has_other_shapes(data.shapes)
        if self._pipeline.training is None or (not self.is_in_train and is_other):
            self._start(data, 1, None)
        elif self.is_in_train:
            self._follow_values()
        else:
            self._pipeline.scatter()
        self._pipeline.use_weights(evaluation=True)
        data = self._sequence.evaluation(data, args, self.state.global_step if self.is_in_train else None)
        loss_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        evaluation = self._evaluation_of(data, loss_only=loss_only, ignored=ignore_keys)
        looks = any(map(may_look, (self.compute_metrics, self.preprocess_logits_for_metrics)))
        if of_all_ranks([int(looks)], torch.int64).any():
            self._pipeline.gather()
        try:
            result = evaluated(
                self._pipeline,
                data,
                args,
                evaluation,
                preprocess=self.preprocess_logits_for_metrics,
                main_input=self._samples.main_input if "inputs" in args.include_for_metrics else None,
            )
        finally:
            if data.ahead is not None:
                data.ahead.end()
        if not self.is_in_train and isinstance(data.draws, EvaluationDraws):
            self._sequence.go_on_from(data.draws.end)
        self.callback_handler.eval_dataloader = dataloader
        for _ in range(-(-samples // args.per_device_eval_batch_size)):
            self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)
        metrics = metrics_of(
            result,
            args,
            compute=self.compute_metrics,
            first_item=self._first_item,
            prefix=f"{metric_key_prefix}_",
            fills=not isinstance(dataloader, DataLoaderShard),
        )
        return EvalLoopOutput(
            predictions=result.predictions, label_ids=result.label_ids, metrics=metrics, num_samples=samples
        )

    def _evaluation_of(
        self, data: CollatedData, *, loss_only: bool, ignored: Sequence[str] | None = None
    ) -> Evaluation:
        if ignored is None:
            config = getattr(self.model, "config", None)
            ignored = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        assert isinstance(data.order, InOrder)
        with self._tracing():
            return check_evaluation(
                self._pipeline, data, self.args, samples=data.order.samples, loss_only=loss_only, ignored=ignored
            )

    def _loaders_of_evaluations(self) -> dict[str, Any]:
        """The loaders of the evaluations that the training will run, by the names of several."""
        if self.args.eval_strategy == "no" or self.eval_dataset is None:
            return {}
        names = self.eval_dataset.keys() if isinstance(self.eval_dataset, dict) else [""]
        with PROCESS.at(PROCESS.states()):  # a script's own method may draw a subset
            loaders = {name: self.get_eval_dataloader(name or None) for name in names}
        for loader in loaders.values():
            self._check_loader_of_evaluation(loader, "get_eval_dataloader")
        return loaders

    def _check_loader_of_evaluation(self, loader: Any, method: str) -> None:
        """Raise InputError if ``method`` is the script's, and returned what a pipeline cannot read."""
        if getattr(type(self), method) is not getattr(Trainer, method):
            size = self.args.per_device_eval_batch_size
            check_loader(loader, method, size, "TrainingArguments.per_device_eval_batch_size")

    def _check_evaluations(self) -> None:
        """Raise the errors of the evaluations that the training will run, before its first iteration."""
        loss_only = self.compute_metrics is None or self.args.prediction_loss_only
        for name, loader in self._loaders_of_evaluations().items():
            data = self._samples.of_evaluation(loader)
            check_same_data(data, f"eval_dataset{f'[{name!r}]' * bool(name)}")
            self._evaluation_of(data, loss_only=loss_only)
            check_samples(data, self._samples.main_input)

    def _check_reads(self, data: CollatedData) -> None:
        """Raise InputError if the script's code names an attribute that the model's forward sets."""
        kept = kept_by_forward(self._pipeline.build, data.shapes, device=self.args.device.type)
        methods = [*own_methods(type(self)), self.compute_metrics, self.preprocess_logits_for_metrics]
        check_names_none(kept, [*filter(is_users, self.callback_handler.callbacks), *methods])

    # Between this rank and the others

    def _add_loss(self, loss: float) -> None:
        """Add the loss of an iteration to the sum since the last log, as transformers does, there by micro-batches."""
        if not self.args.logging_nan_inf_filter or math.isfinite(loss):
            self._tr_loss += loss
            return
        for _ in range(self.current_gradient_accumulation_steps):
            self._tr_loss += self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
