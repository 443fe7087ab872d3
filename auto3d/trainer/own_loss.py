"""The loss that a script's ``compute_loss`` computes, as the forward of the model, so that a pipeline captures it."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from auto3d.errors import InputError

ITEMS = "num_items_in_batch"

ComputeLoss = Callable[..., Any]
"""``Trainer.compute_loss``; with return_outputs=True it gives (the loss, what the model returned)."""


class OwnLoss:
    """Replaces the forward of ``model``: ``compute_loss`` calls the model, whose own forward then runs."""

    def __init__(self, model: nn.Module, compute_loss: ComputeLoss) -> None:
        self._model, self._compute_loss = model, compute_loss
        self._forward: Callable[..., Any] = model.forward
        self._computes = False  # whether ``compute_loss`` runs
        self.in_model = False  # whether the model's own forward runs, which it calls

    def __call__(self, *arguments: Any, **inputs: Any) -> Any:
        if self._computes:
            self.in_model = True
            try:
                return self._forward(*arguments, **inputs)
            finally:
                self.in_model = False
        self._computes = True
        try:
            items = inputs.pop(ITEMS, None)
            loss, outputs = self._compute_loss(self._model, inputs, return_outputs=True, **{ITEMS: items})
        finally:
            self._computes = False
        if isinstance(outputs, Mapping):
            return {"loss": loss, **{name: value for name, value in outputs.items() if name != "loss"}}
        if isinstance(outputs, tuple):  # the first is the model's loss
            return loss, *outputs[1:]
        raise InputError(
            f"compute_loss: its outputs are a {type(outputs).__name__}, of which transformers would take all but the "
            "first sample as predictions; let the model return a dict or a tuple"
        )


def with_loss(build: Callable[[], nn.Module], compute_loss: ComputeLoss | None) -> Callable[[], nn.Module]:
    """``build``, whose modules have the loss of ``compute_loss``; None: that of the model."""
    if compute_loss is None:
        return build

    def built() -> nn.Module:
        model = build()
        loss = OwnLoss(model, compute_loss)

        def forward(*arguments: Any, **inputs: Any) -> Any:  # torch.export takes functions only
            return loss(*arguments, **inputs)

        forward.own_loss = loss  # type: ignore[attr-defined]
        model.forward = forward
        return model

    return built


def own_loss_of(model: nn.Module) -> OwnLoss | None:
    """That of a module of ``with_loss``."""
    return getattr(model.forward, "own_loss", None)
