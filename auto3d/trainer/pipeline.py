"""The pipeline of a Trainer: this rank's part of the model, and the model's weights between the two."""

import gc
from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

from auto3d.capture.export import InputSpec
from auto3d.capture.model import CapturedModel
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.checkpoint import Checkpoints
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.training import Training
from auto3d.trainer.arguments import TrainingArguments
from auto3d.trainer.gather import gather, keep_optimizer_state, optimizer_state, scatter
from auto3d.trainer.instance import build_of, check_reached, state_of, traits_of
from auto3d.trainer.planned import batch_of, plan_of
from auto3d.trainer.samples import CollatedData
from auto3d.trainer.settings import training_settings
from auto3d.trainer.setup import setup


class Pipeline:
    """This rank's part of the pipeline that trains and evaluates ``model``; all ranks call the same methods.

    Raises InputError for a model or batch sizes that no pipeline can have.
    """

    training: Training | None  # None until ``start``
    settings: TrainingSettings  # settings of the training
    inputs: Mapping[str, InputSpec]  # inputs of a sample, for which the model was captured
    gathered: int  # how often ``gather`` has written to each weight of the model

    def __init__(self, model: nn.Module, args: TrainingArguments) -> None:
        self._model, self._args = model, args
        self.build: Callable[[], nn.Module] = build_of(model)
        self._weights = state_of(model)
        self.batch = batch_of(setup(), args)
        self.training = None
        self.gathered = 0
        self._is_gathered = True  # whether the model has the pipeline's weights, or what the script made of them
        self._traits: dict[str, object] = {}  # those of the model in ``_planned``
        self._planned: tuple[Plan, CapturedModel] | None = None

    def check_batch(self) -> None:
        """Raise InputError if the arguments say other batch sizes than when the Trainer was made."""
        if batch_of(setup(), self._args) != self.batch:
            raise InputError(
                "TrainingArguments: per_device_train_batch_size or gradient_accumulation_steps was changed since the "
                "Trainer was made; make a Trainer with the new ones"
            )

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
        decayed: Collection[str],
        loss_mean: str,
        checkpoints: Checkpoints | None,
    ) -> Training:
        """Build a training of ``data`` from the model's weights.

        ``decayed`` names parameters with weight decay; ``loss_mean`` is that of TrainingSettings.
        """
        self.gather()  # an earlier training may have been interrupted
        goes_on = self.training is not None and checkpoints is None
        earlier = optimizer_state(self.training.rank) if self.training is not None else {}
        self.training = None
        gc.collect()  # the stages of an earlier training
        self.inputs = data.shapes
        self._weights, self._is_gathered = state_of(self._model), checkpoints is None
        if self._planned is None or self.is_outdated:
            self.build, self._traits = build_of(self._model), dict(traits_of(self._model))
            self._planned = plan_of(setup(), self._args, self.build, data.shapes)
            check_reached(self._model, self._planned[1].exported.constants)
        plan, captured = self._planned
        exempt = {name for name, _ in self._model.named_parameters()} - set(decayed)
        self.settings = training_settings(self._args, iterations, exempt, loss_mean)
        self.training = Training(
            captured, plan, self.settings, data, setup().world, state=self._weights, checkpoints=checkpoints
        )
        if goes_on:
            keep_optimizer_state(self.training.rank, earlier, timeout_s=self._args.ddp_timeout)
        return self.training

    @property
    def is_outdated(self) -> bool:
        """Whether the model has other traits than when the pipeline was planned, so that it must start again."""
        return self._traits != dict(traits_of(self._model))

    def trained(self) -> None:
        """Note that the pipeline has newer weights than the model."""
        self._is_gathered = False

    def gather(self) -> None:
        """Copy the pipeline's weights into the model, on every rank, if the model has values."""
        if self.training is not None and self._weights is not None and not self._is_gathered:
            gather(self.training.rank, self._weights, timeout_s=self._args.ddp_timeout)
            self.gathered += 1
            self._is_gathered = True

    def scatter(self) -> None:
        """Copy the model's weights into the pipeline, which had the same: the script may have changed them since.

        Raises InputError unless all ranks have changed them alike.
        """
        if self.training is not None and self._weights is not None and self._is_gathered:
            scatter(self.training.rank, self._weights, timeout_s=self._args.ddp_timeout)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state dict of a model on the meta device, on every rank."""
        if self.training is None:
            raise InputError("Trainer.save_model: the model on the meta device has no weights before train()")
        whole: dict[str, torch.Tensor] = {}
        gather(self.training.rank, whole, timeout_s=self._args.ddp_timeout)
        first_name = {id(parameter): name for name, parameter in self._model.named_parameters()}
        entries = self._model.state_dict(keep_vars=True).items()
        return {name: whole[first_name.get(id(tensor), name)] for name, tensor in entries}
