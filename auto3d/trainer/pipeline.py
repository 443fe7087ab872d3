"""The pipeline of a Trainer: this rank's part of the model, and the model's weights between the two."""

import gc
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from auto3d.capture.export import InputSpec
from auto3d.capture.model import CapturedModel
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.checkpoint.format import Checkpoints, checkpoint_folder
from auto3d.runtime.checkpoint.state_part import StatePart
from auto3d.runtime.optimizer.classes import averages
from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.runtime.training import Training
from auto3d.trainer.arguments import TrainingArguments
from auto3d.trainer.gather import (
    OF_OPTIMIZER,
    check_alike,
    gather,
    keep_optimizer_state,
    make_alike,
    optimizer_state,
    scatter,
    state_of_frozen,
)
from auto3d.trainer.instance import build_of, check_reached, state_of, traits_of
from auto3d.trainer.optimizer import (
    LEFT_OUT,
    StateOnRanks,
    check_groups_alike,
    check_optimizer,
    fixed_of,
    numbers_of,
    optimizer_settings,
    parameters_of,
    tell_left_out,
)
from auto3d.trainer.own_loss import ComputeLoss, with_loss
from auto3d.trainer.planned import batch_of, plan_of, planned_again
from auto3d.trainer.reads import Reads, changed
from auto3d.trainer.samples import CollatedData
from auto3d.trainer.settings import training_settings
from auto3d.trainer.setup import setup

_NO_OPTIMIZER = OptimizerSettings(optimizer="sgd", momentum=0.0)  # a pipeline that only evaluates has these settings


class Pipeline:
    """This rank's part of the pipeline that trains and evaluates ``model``; all ranks call the same methods.

    Raises InputError for a model or batch sizes that no pipeline can have.
    """

    training: Training | None  # None until ``start``
    settings: TrainingSettings  # settings of the training
    inputs: Mapping[str, InputSpec]  # inputs of a sample, for which the model was captured
    captured_lengths: tuple[int, ...] = ()  # shorter ones of samples, for which it was captured too

    def __init__(self, model: nn.Module, args: TrainingArguments) -> None:
        self._model, self._args = model, args
        self.build: Callable[[], nn.Module] = build_of(model)
        self._own_loss: ComputeLoss | None = None
        self.constants: Mapping[str, Any] = {}  # arguments of each call of the model, beside its inputs
        self._weights = state_of(model)
        self.batch = batch_of(setup(), args)
        self.training, self.inputs = None, {}
        self._is_gathered = True  # whether the model has the pipeline's weights, or what the script made of them
        self._traits: dict[str, object] = {}  # traits of the model in ``_planned``
        self._reads: Reads | None = None  # values beside the model that the code of ``_planned`` reads
        self._values_read: dict[str, Hashable] = {}  # ``_reads`` when it was planned
        self._planned: tuple[Plan, CapturedModel] | None = None
        self._learnt_by: torch.optim.Optimizer | None = None  # the script's optimizer of the steps so far
        self._optimizer: torch.optim.Optimizer | None = None  # the script's optimizer in the training
        self._fixed: object = None  # ranks took this over from ``_optimizer`` when they made theirs
        self._left_out: set[str] = set()  # parameters of which a line has said that the optimizer lacks them
        self._optimizer_state: dict[str, StatePart] = {}  # state of parameters that are frozen since

    def compute(self, loss: ComputeLoss) -> None:
        """Train ``loss`` in place of the model's own."""
        self._own_loss = loss
        self._build_anew()

    def call_with(self, constants: Mapping[str, Any]) -> None:
        """Call the model with these further arguments, too."""
        if constants != self.constants:
            self.constants = constants
            self._build_anew()

    def _build_anew(self, *, gets_items: bool = False) -> None:
        self.build = with_loss(build_of(self._model), self._own_loss, gets_items=gets_items, constants=self.constants)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Inside, code of the stages is traced. Raises InputError if that changes a value beside the model."""
        self._reads = Reads(self._own_loss, self._model)
        with self._reads.kept():
            yield

    def check_batch(self) -> None:
        """Raise InputError if the arguments say other batch sizes than when the Trainer was made."""
        if batch_of(setup(), self._args) != self.batch:
            raise InputError(
                "TrainingArguments: per_device_train_batch_size or gradient_accumulation_steps was changed since the "
                "Trainer was made; make a Trainer with the new ones"
            )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise InputError for an optimizer that has not learnt here and is no new one of the model's parameters."""
        if optimizer is not self._learnt_by:
            check_optimizer(optimizer, self._model)

    @property
    def learnt_by(self) -> torch.optim.Optimizer | None:
        """The script's optimizer for which ranks have made the steps so far."""
        return self._learnt_by

    @property
    def plan(self) -> Plan | None:
        """The Plan by which it trains; None until the first ``start`` has made it."""
        return None if self._planned is None else self._planned[0]

    @property
    def on_meta(self) -> bool:
        """Whether the model is on the meta device, so that only the pipeline has its weights."""
        return self._weights is None

    def start(
        self,
        data: CollatedData,
        iterations: int,
        *,
        optimizer: torch.optim.Optimizer | None,
        loss_mean: str,
        gets_items: bool,
        checkpoints: Checkpoints | None,
        goes_on: bool = False,
    ) -> Training:
        """Build a training of ``data`` from the model's weights, which updates them as ``optimizer`` would.

        If that has learnt in an earlier training, it goes on from there; None is for evaluations. ``loss_mean`` is as
        in TrainingSettings, ``gets_items`` as in OwnLoss. If it ``goes_on``, the training begins after the iterations
        of the earlier one.
        """
        self.gather()  # an earlier training may have been interrupted
        earlier, self.training = self.training, None
        if checkpoints is not None or optimizer is not self._learnt_by:
            self._optimizer_state, self._learnt_by = {}, None
        elif earlier is not None:
            self._optimizer_state |= optimizer_state(earlier.rank)
        done, numbers = (0, {}) if earlier is None else (earlier.done, earlier.rank.numbers())
        evaluates = earlier is not None and earlier.rank.executor.evaluates
        del earlier
        gc.collect()  # the stages of an earlier training
        captured_for, self.inputs = self.inputs, data.shapes
        self._weights, self._is_gathered = state_of(self._model), checkpoints is None
        if self._weights is not None:
            unify = make_alike if self._planned is None else check_alike
            unify(self._weights)
        if self._planned is None or self.is_outdated or captured_for != self.inputs:
            self._build_anew(gets_items=gets_items)
            self._traits = self._traits_now()
            self._values_read = {} if self._reads is None else self._reads.now()
            before = self._planned
            again = before and planned_again(*before, self._args, self.build, data.shapes)
            self._planned = again or plan_of(setup(), self._args, self.build, data.shapes)
            if before and optimizer is not None and optimizer is self._learnt_by and averages(type(optimizer)):
                self._check_none_is_frozen(before[1])
            check_reached(self._model, self._planned[1].exported.constants)
        plan, captured = self._planned
        updates = _NO_OPTIMIZER
        if optimizer is not None:
            self._optimizer = optimizer
            updates = optimizer_settings(optimizer, self._model, clip_norm=self._args.max_grad_norm or 0.0)
            self._fixed = _fixed_of(optimizer)
            tell_left_out(updates, self._left_out)
        self.settings = training_settings(self._args, iterations, updates, loss_mean)
        data = data.of_plan(captured, plan, self.settings)
        self.captured_lengths = data.captured_lengths
        self.training = Training(
            captured, plan, self.settings, data, setup().world, state=self._weights, checkpoints=checkpoints
        )
        if self._learnt_by is not None:
            self._optimizer_state = keep_optimizer_state(self.training.rank, self._optimizer_state)
            self.training.rank.executor.note_weights(evaluation=evaluates)
        if goes_on:
            self.training.begin_after(done, numbers)
        if checkpoints is not None:
            self._note_learnt()
            source = checkpoint_folder(checkpoints.folder, self.training.first)
            self._optimizer_state = state_of_frozen(self.training.rank, source)
        return self.training

    @property
    def state(self) -> dict[str, StatePart]:
        """What this rank holds of the training's state, with the state of optimizers of parameters that are frozen."""
        assert self.training is not None, "it has state once it has started"
        frozen = {f"{OF_OPTIMIZER}{name}": part for name, part in self._optimizer_state.items()}
        return self.training.rank.state() | frozen

    def _check_none_is_frozen(self, before: CapturedModel) -> None:
        """Raise InputError if a parameter of ``before``, with which an optimizer that averages has learnt, is frozen.

        transformers' optimizer would go on switching it between its weights of training and of evaluation.
        """
        assert self._planned is not None, "it has been captured again"
        if frozen := sorted(set(before.graph.trained) - set(self._planned[1].graph.trained)):
            raise InputError(
                f"model: {frozen[0]} is frozen in mid-training, and the optimizer has other weights in evaluation: "
                "transformers' would go on switching it between the two; freeze it before the first train(), or use "
                "another optimizer"
            )

    @property
    def is_outdated(self) -> bool:
        """Whether the pipeline must start again: the model has other traits than when it was planned, or its code would
        read other values."""
        return self._traits != self._traits_now() or bool(self.value_changed)

    def _traits_now(self) -> dict[str, object]:
        return {**dict(traits_of(self._model)), "arguments of its call": repr(self.constants)}

    def has_other_shapes(self, shapes: Mapping[str, InputSpec]) -> bool:
        """Whether it was made for samples whose inputs, of those that both have, are of other ``shapes``."""
        return any(self.inputs.get(name, spec) != spec for name, spec in shapes.items())

    @property
    def value_changed(self) -> str:
        """The place of a value that the code of the stages would not read as when the pipeline was planned; empty if
        there is none."""
        return "" if self._reads is None else changed(self._values_read, self._reads.now())

    def trained(self) -> None:
        """Note that the pipeline has newer weights than the model."""
        self._is_gathered = False
        self._note_learnt()

    def _note_learnt(self) -> None:
        """Note that the ranks' optimizers have made steps for the script's."""
        self._learnt_by = self._optimizer
        if self._optimizer is not None and isinstance(self._optimizer.state, StateOnRanks):
            self._optimizer.state.has_learnt = True

    def use_weights(self, *, evaluation: bool) -> None:
        """Have the weights of evaluation, or of training, where the optimizer averages; so has a model with the others.

        All ranks must call it.
        """
        assert self.training is not None, "it has weights once it has started"
        if self.training.rank.executor.use_weights(evaluation=evaluation):
            had_them, self._is_gathered = self._is_gathered, False
            if had_them:
                self.gather()

    def gather(self) -> None:
        """Copy the pipeline's weights into the model, on every rank, if the model has values."""
        if self.training is not None and self._weights is not None and not self._is_gathered:
            gather(self.training.rank, self._weights)
            self._is_gathered = True

    def scatter(self) -> None:
        """Copy the model's weights into the pipeline, which had the same: the script may have changed them since.

        Raises InputError unless all ranks have changed them alike.
        """
        if self.training is not None and self._weights is not None and self._is_gathered:
            scatter(self.training.rank, self._weights)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Update from now on with the numbers that the groups of the script's ``optimizer`` have, such as its rates."""
        assert self.training is not None, "it follows while it trains"
        if optimizer is not self._optimizer:
            raise InputError("Trainer.optimizer: it was set during the training; set it before train()")
        if _fixed_of(optimizer) != self._fixed:
            raise InputError(
                "Trainer.optimizer: what is no number in its groups, its attributes, or its hooks were changed during "
                "the training, outside of an event of a callback or to what a pipeline cannot follow; change it before "
                "train()"
            )
        groups = numbers_of(optimizer)
        for optimizers in self.training.rank.optimizers.values():
            for rule, (own, constant) in optimizers.items():
                if rule.script_group is None or rule.script_group == LEFT_OUT:
                    continue
                check_groups_alike(groups, rule)
                for own_group in own.param_groups:
                    own_group.update(groups[rule.script_group])
                constant.base_lrs = [groups[rule.script_group]["lr"]] * len(own.param_groups)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state dict of a model on the meta device, on every rank."""
        if self.training is None:
            raise InputError("Trainer.save_model: the model on the meta device has no weights before train()")
        whole: dict[str, torch.Tensor] = {}
        gather(self.training.rank, whole)
        first_name = {id(parameter): name for name, parameter in self._model.named_parameters()}
        entries = self._model.state_dict(keep_vars=True).items()
        return {name: whole[first_name.get(id(tensor), name)] for name, tensor in entries}


def _fixed_of(optimizer: torch.optim.Optimizer) -> object:
    """What ``optimizer`` says that ranks take over only where they make theirs, as something to compare."""
    return fixed_of(optimizer), parameters_of(optimizer)
