"""Which loss of a global batch transformers' Trainer takes of a model."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from auto3d.capture.empty import empty_model
from auto3d.capture.export import InputSpec, quiet_torch
from auto3d.errors import InputError
from auto3d.trainer.instance import two_samples
from auto3d.trainer.own_loss import ITEMS, OwnLoss, own_loss_of


def loss_mean_of(
    build: Callable[[], nn.Module],
    inputs: Mapping[str, InputSpec],
    *,
    takes_items: bool,
    is_scaled: bool | None,
    device: str,
) -> str:
    """The ``loss_mean`` of TrainingSettings that transformers has for the model that ``build`` makes.

    ``takes_items`` says that its forward takes ``num_items_in_batch``: transformers then leaves it to the model to
    divide by that number, and adds up what the micro-batches give, whether the model does or not. ``is_scaled`` is the
    script's own word for that (Trainer.loss_is_scaled_for_ga), if there is one. Raises InputError for a loss of the
    script that divides by that number itself.
    """
    gives_items = takes_items and "labels" in inputs
    if not (gives_items if is_scaled is None else is_scaled):
        return "micro-batches"
    if not gives_items:
        return "sum"
    model = empty_model(build, device)
    model.module.train()
    arguments = two_samples(model, inputs)
    with torch.no_grad(), model.mode:
        items = torch.ones((), dtype=torch.int64, device=device)
        uses = _Uses(items, own_loss_of(model.module))
        try:
            with uses, quiet_torch():
                model.module(**arguments, **{ITEMS: items})
        except Exception:  # code that needs values, such as a choice of experts, has none here
            return "items" if _may_divide(model.module) else "sum"
    if uses.by_script:
        raise InputError(
            f"Trainer.compute_loss: it uses {ITEMS}, which a pipeline knows only when all micro-batches have run; "
            "return the mean over the batch, and set loss_is_scaled_for_ga = False"
        )
    return "items" if uses.found else "sum"


def _may_divide(model: nn.Module) -> bool:
    """Whether a forward in ``model`` names the number of items, or a loss function of transformers, which divides."""
    forwards = {type(part).forward for part in model.modules()}
    texts = []
    for forward in filter(inspect.isfunction, forwards):
        with suppress(OSError):  # no file has the code
            texts.append(inspect.getsource(forward))
    return any(ITEMS in text or "self.loss_function(" in text for text in texts)


class _Uses(TorchFunctionMode):
    """Finds out whether an operation takes ``tensor``, and whether one of ``own``, a script's loss, does."""

    def __init__(self, tensor: torch.Tensor, own: OwnLoss | None) -> None:
        self._tensor, self._own = tensor, own
        self.found = self.by_script = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each is self._tensor for each in tree_leaves((args, kwargs or {}))):
            self.found = True
            self.by_script |= self._own is not None and not self._own.in_model
        return function(*args, **(kwargs or {}))
