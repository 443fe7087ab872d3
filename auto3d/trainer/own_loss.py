"""The loss that ``Trainer.compute_loss`` computes, as the forward of the model, so that a pipeline captures it.

It is a script's own method, or transformers' with a ``compute_loss_func`` or label smoothing.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from auto3d.errors import InputError

ITEMS = "num_items_in_batch"
SMOOTHING = "label_smoothing_factor"


@dataclass(frozen=True)
class ComputeLoss:
    """A loss that is not the model's own."""

    call: Callable[..., Any]
    """``Trainer.compute_loss``; with return_outputs=True it gives (the loss, what the model returned)."""
    name: str  # compute_loss, compute_loss_func or SMOOTHING, which a script has given


class OwnLoss:
    """Replaces the forward of ``model``: ``compute_loss`` calls the model, whose own forward then runs.

    If it ``gets_items``, the number of items is 1, so that a loss which divides by it is a sum over items. Its inputs
    have the ``constants``, too. Under autocast the model alone runs in low precision, as accelerate has it: the loss
    gets its outputs in float32.
    """

    def __init__(
        self, model: nn.Module, compute_loss: ComputeLoss, *, gets_items: bool, constants: Mapping[str, Any]
    ) -> None:
        self._model, self.of, self._gets_items, self._constants = model, compute_loss, gets_items, constants
        self.forward: Callable[..., Any] = model.forward
        self._autocast: AbstractContextManager | None = None  # None while ``compute_loss`` does not run
        self.in_model = False  # whether the model's own forward runs, which it calls

    def __call__(self, *arguments: Any, **inputs: Any) -> Any:
        if self._autocast is not None:
            self.in_model = True
            try:
                with self._autocast:
                    outputs = self.forward(*arguments, **inputs)
                return tree_map_only(torch.Tensor, _in_float32, outputs)
            finally:
                self.in_model = False
        device = next(iter(inputs.values())).device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self._autocast = nullcontext() if kind is None else torch.autocast(device, kind)
        try:
            items = inputs.pop(ITEMS, None)
            if items is None and self._gets_items:
                items = torch.ones((), dtype=torch.int64, device=inputs["labels"].device)
            with nullcontext() if kind is None else torch.autocast(device, enabled=False):
                given = {**inputs, **self._constants}
                loss, outputs = self.of.call(self._model, given, return_outputs=True, **{ITEMS: items})
        finally:
            self._autocast = None
        if isinstance(outputs, Mapping):
            return {"loss": loss, **{name: value for name, value in outputs.items() if name != "loss"}}
        if isinstance(outputs, tuple):  # the first is the model's loss
            return loss, *outputs[1:]
        raise InputError(
            f"compute_loss: its outputs are a {type(outputs).__name__}, of which transformers would take all but the "
            "first sample as predictions; let the model return a dict or a tuple"
        )


def _in_float32(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def with_loss(
    build: Callable[[], nn.Module],
    compute_loss: ComputeLoss | None,
    *,
    gets_items: bool = False,
    constants: Mapping[str, Any] | None = None,
) -> Callable[[], nn.Module]:
    """``build``, whose modules have the loss of ``compute_loss``, as OwnLoss says; None: the model's own loss.

    ``constants`` are further arguments of each call, by name.
    """
    if compute_loss is None and not constants:
        return build

    def built() -> nn.Module:
        model = build()
        if compute_loss is None:
            call: Callable[..., Any] = partial(model.forward, **constants or {})
        else:
            call = OwnLoss(model, compute_loss, gets_items=gets_items, constants=constants or {})

        def forward(*arguments: Any, **inputs: Any) -> Any:  # torch.export takes functions only
            return call(*arguments, **inputs)

        forward.own_loss = call if isinstance(call, OwnLoss) else None  # type: ignore[attr-defined]
        model.forward = forward
        return model

    return built


def own_loss_of(model: nn.Module) -> OwnLoss | None:
    """The loss of a module of ``with_loss``."""
    return getattr(model.forward, "own_loss", None)
