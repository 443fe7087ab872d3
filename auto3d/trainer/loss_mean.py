"""Which loss of a global batch transformers' Trainer takes of a model, or of a script's own loss."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import isclose
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from auto3d.capture.empty import EmptyModel, empty_model
from auto3d.capture.errors import explain
from auto3d.capture.export import InputSpec, quiet_torch
from auto3d.data.interface import IGNORED
from auto3d.errors import InputError
from auto3d.runtime.settings import SUMMED_ITEMS
from auto3d.trainer.instance import two_samples
from auto3d.trainer.own_loss import ITEMS, SMOOTHING, OwnLoss, own_loss_of

_FEW = 16  # tokens that are enough to try a loss
_ALIKE = 1e-4  # difference that rounding may explain


def loss_mean_of(
    build: Callable[[], nn.Module],
    inputs: Mapping[str, InputSpec],
    *,
    gives_items: bool,
    is_scaled: bool | None,
    device: str,
) -> str:
    """The ``loss_mean`` of TrainingSettings that transformers has for the model that ``build`` makes, or its OwnLoss.

    Where transformers ``gives_items``, the number of labels that are not ignored, to a forward or a function that takes
    ``num_items_in_batch``, it leaves it to them to divide, and adds up what the micro-batches give in any case.
    ``is_scaled`` is the script's own word for whether losses are added up (Trainer.loss_is_scaled_for_ga), if there is
    one.

    Raises InputError where transformers would divide twice, and for a loss of the script that uses the number but is no
    sum over labels divided by it, or cannot be tried.
    """
    is_added_up = gives_items if is_scaled is None else is_scaled
    if not gives_items:
        return "sum" if is_added_up else "micro-batches"
    model = empty_model(build, device)
    model.module.train()
    own = own_loss_of(model.module)
    divided = _divided(model, inputs, own, device=device, may_divide=is_added_up)
    if is_added_up:
        return divided
    if divided != "sum":
        raise InputError(
            f"Trainer.loss_is_scaled_for_ga: found False, and the loss is divided by {ITEMS}; transformers would divide"
            " it by gradient_accumulation_steps too: leave it out, or return the mean over the batch"
        )
    return "micro-batches"


def _divided(
    model: EmptyModel, inputs: Mapping[str, InputSpec], own: OwnLoss | None, *, device: str, may_divide: bool
) -> str:
    """The ``loss_mean`` of micro-batches that are added up; ``may_divide`` allows a guess where it cannot be tried."""
    if own is not None and own.of.name == SMOOTHING:
        return SUMMED_ITEMS  # transformers' LabelSmoother divides
    if own is not None and (uses := _uses_of(model, _short(inputs), own, device=device)).error is None:
        inputs = _short(inputs)
    else:
        uses = _uses_of(model, inputs, own, device=device)
    if uses.error is not None:
        if own is not None and own.of.takes_outputs:
            raise _not_tried(own, uses.error)
        return "items" if may_divide and _may_divide(model.module) else "sum"
    if own is not None and uses.by_script:
        if uses.by_model:
            raise InputError(f"Trainer: both compute_loss and the model divide by {ITEMS}; let one of them do it")
        return _mean_of_own(own, uses.outputs, inputs)
    return "items" if uses.by_model else "sum"


class _Uses(TorchFunctionMode):
    """Which code takes ``items`` as an operand: the model's, or that of ``own``, a script's loss."""

    def __init__(self, items: torch.Tensor, own: OwnLoss | None) -> None:
        self._items, self._own = items, own
        self.by_model = self.by_script = False
        self.outputs: Any = None  # what the model returned to ``own``
        self.error: Exception | None = None  # why the code did not run without values

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each is self._items for each in tree_leaves((args, kwargs or {}))):
            is_script = self._own is not None and not self._own.in_model
            self.by_script |= is_script
            self.by_model |= not is_script
        return function(*args, **(kwargs or {}))


def _uses_of(model: EmptyModel, inputs: Mapping[str, InputSpec], own: OwnLoss | None, *, device: str) -> _Uses:
    """Who uses the number of items in a forward of ``model`` without values."""
    items = torch.ones((), dtype=torch.int64, device=device)
    uses = _Uses(items, own)
    if own is not None:
        forward = own.forward

        def recorded(*arguments: Any, **given: Any) -> Any:
            uses.outputs = forward(*arguments, **given)
            return uses.outputs

        own.forward = recorded
    try:
        with torch.no_grad(), model.mode, uses, quiet_torch():
            model.module(**two_samples(model, inputs), **{ITEMS: items})
    except Exception as error:  # code that needs values, such as a choice of experts, has none here
        uses.error = error
    if own is not None:
        own.forward = forward
    return uses


def _short(inputs: Mapping[str, InputSpec]) -> dict[str, InputSpec]:
    """The same with sequences of whole numbers cut to a few."""
    return {
        name: replace(spec, shape=(min(spec.shape[0], _FEW),))
        if len(spec.shape) == 1 and not spec.dtype.is_floating_point
        else spec
        for name, spec in inputs.items()
    }


def _mean_of_own(own: OwnLoss, outputs: Any, inputs: Mapping[str, InputSpec]) -> str:
    """The ``loss_mean`` of a loss that uses the number of items, tried on random ``outputs`` of the model.

    Raises InputError if it does not divide a sum by that number.
    """
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        outputs = tree_map_only(torch.Tensor, lambda value: _random(tuple(value.shape), value.dtype), outputs)
        batch = {name: _random((2, *spec.shape), spec.dtype) for name, spec in inputs.items()}
        labels = batch["labels"]
        some = torch.rand(labels.shape) < 0.5
        some.view(-1)[0], some.view(-1)[-1] = True, False

        def loss(items: int, labels: torch.Tensor, samples: slice = slice(None)) -> float:
            own.forward = lambda *_, **__: tree_map_only(torch.Tensor, lambda value: value[samples].clone(), outputs)
            given = {name: value[samples] for name, value in (batch | {"labels": labels}).items()}
            result = own(**given, **{ITEMS: torch.tensor(items)})
            return float(result["loss"] if isinstance(result, Mapping) else result[0])

        try:
            of_one, of_three = loss(1, labels), loss(3, labels)
            if labels.is_floating_point():  # these are never ignored
                of_parts = [loss(1, labels, part) for part in (slice(1), slice(1, 2))]
            else:
                of_parts = [loss(1, labels.masked_fill(part, IGNORED)) for part in (some, ~some)]
        except Exception as error:
            raise _not_tried(own, error) from None
    if isclose(of_one, of_three, rel_tol=_ALIKE):
        return "sum"
    if not isclose(of_one, 3 * of_three, rel_tol=_ALIKE):
        raise InputError(
            f"Trainer.{own.of.name}: its loss is not inversely proportional to {ITEMS}, which a pipeline knows only "
            "when all micro-batches have run; divide the whole loss by it, or by nothing"
        )
    if not isclose(of_one, sum(of_parts), rel_tol=_ALIKE):
        raise InputError(
            f"Trainer.{own.of.name}: it divides by {ITEMS}, and its losses of some labels and of the others, where the "
            f"rest are {IGNORED} or other samples, do not add up to that of all labels; let it be a sum over the "
            f"labels that are not {IGNORED}"
        )
    return SUMMED_ITEMS


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random numbers; whole ones are 0 or 1."""
    return torch.randn(shape, dtype=dtype) if dtype.is_floating_point else torch.randint(2, shape).to(dtype)


def _not_tried(own: OwnLoss, error: Exception) -> InputError:
    return InputError(
        f"Trainer.{own.of.name}: what it does with {ITEMS} cannot be tried on random outputs of the model "
        f"({explain(error)}); let it use its arguments only, or say TrainingArguments.loss_mean"
    )


def _may_divide(model: nn.Module) -> bool:
    """Whether a forward in ``model`` names the number of items, or a loss function of transformers, which divides."""
    forwards = {type(part).forward for part in model.modules()}
    texts = []
    for forward in filter(inspect.isfunction, forwards):
        with suppress(OSError):  # no file has the code
            texts.append(inspect.getsource(forward))
    return any(ITEMS in text or "self.loss_function(" in text for text in texts)
