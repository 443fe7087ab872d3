"""Which loss of a global batch transformers' Trainer takes of a model, or of a script's own loss."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from dis import get_instructions
from math import isclose
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from auto3d.capture.empty import EmptyModel, empty_model
from auto3d.capture.errors import explain
from auto3d.capture.export import InputSpec
from auto3d.data.interface import IGNORED
from auto3d.errors import InputError
from auto3d.runtime.settings import SUMMED_ITEMS
from auto3d.trainer.degree import degree_in
from auto3d.trainer.instance import run_without_values
from auto3d.trainer.own_loss import ITEMS, SMOOTHING, OwnLoss, own_loss_of

_FEW = 16  # tokens that are enough to try a loss
_SCALES = (0.0, 1.0, 100.0)  # outputs are tried at these: a term may be 0 at one
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
    given = inputs if own is None else _short(inputs)
    uses = _uses_of(model, given, own, device=device)
    if uses.error is not None and given != inputs:
        given = inputs
        uses = _uses_of(model, given, own, device=device)
    if uses.error is not None:
        if own is not None:
            if _reads_items(own):
                raise _not_tried(own, uses.error)
            return "sum"
        return "items" if may_divide and _may_divide(model.module) else "sum"
    if own is not None and uses.by_script:
        if uses.by_model:
            raise InputError(f"Trainer: both compute_loss and the model divide by {ITEMS}; let one of them do it")
        return _mean_of_own(own, uses.outputs, given)
    return "items" if uses.by_model else "sum"


class _Uses(TorchFunctionMode):
    """Which code takes ``items`` as an operand: the model's code, or ``own``, a script's loss."""

    def __init__(self, items: torch.Tensor, own: OwnLoss | None) -> None:
        self._items, self._own = items, own
        self.by_model = self.by_script = False
        self.outputs: Any = None  # the model's result, as ``own`` got it
        self.error: Exception | None = None  # why the code did not run without values

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(value is self._items for value in tree_leaves((args, kwargs or {}))):
            is_script = self._own is not None and not self._own.in_model
            self.by_script |= is_script
            self.by_model |= not is_script
        return function(*args, **(kwargs or {}))


def _uses_of(model: EmptyModel, inputs: Mapping[str, InputSpec], own: OwnLoss | None, *, device: str) -> _Uses:
    """Who uses the number of items in a forward of ``model`` without values."""
    with model.mode:
        items = torch.ones((), dtype=torch.int64, device=device)
    uses = _Uses(items, own)
    if own is not None:
        forward = own.forward

        def recorded(*arguments: Any, **given: Any) -> Any:
            uses.outputs = forward(*arguments, **given)
            return uses.outputs

        own.forward = recorded
    try:
        with uses:
            run_without_values(model, inputs, **{ITEMS: items})
    except Exception as error:  # code that needs values has none here
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
    generator = torch.Generator().manual_seed(0)
    outputs = tree_map_only(torch.Tensor, lambda like: _random(like.shape, like.dtype, generator), outputs)
    batch = {name: _random((2, *spec.shape), spec.dtype, generator) for name, spec in inputs.items()}

    def loss(items: torch.Tensor, outputs: Any = outputs, batch: Mapping[str, torch.Tensor] = batch) -> Any:
        own.forward = lambda *_, **__: tree_map_only(torch.Tensor, torch.clone, outputs)
        result = own(**batch, **{ITEMS: items})
        return result["loss"] if isinstance(result, Mapping) else result[0]

    def of_tensors(items: torch.Tensor, *tensors: torch.Tensor) -> Any:
        following = iter(tensors)
        return loss(items, *tree_map_only(torch.Tensor, lambda _: next(following), (outputs, batch)))

    unit, labels = torch.ones((), dtype=torch.int64), batch["labels"]
    some = torch.rand(labels.shape, generator=generator) < 0.5
    some.view(-1)[0], some.view(-1)[-1] = True, False
    none = []
    try:
        with torch.no_grad():
            power = degree_in(of_tensors, unit, *(v for v in tree_leaves((outputs, batch)) if torch.is_tensor(v)))
            if labels.is_floating_point():  # these are never ignored
                samples = (slice(1), slice(1, 2))
                parts = [loss(unit, *tree_map_only(torch.Tensor, itemgetter(s), (outputs, batch))) for s in samples]
            else:
                parts = [loss(unit, batch={**batch, "labels": labels.masked_fill(m, IGNORED)}) for m in (some, ~some)]
                ignored = {**batch, "labels": torch.full_like(labels, IGNORED)}
                none = [loss(unit, _scaled(outputs, scale), ignored) for scale in _SCALES]
            whole = loss(unit)
    except Exception as error:
        raise _not_tried(own, error) from None
    if power == 0:
        return "sum"
    if power != -1:
        raise InputError(
            f"Trainer.{own.of.name}: its loss is not inversely proportional to {ITEMS}, which a pipeline knows only "
            "when all micro-batches have run; divide the whole loss by it, or by nothing"
        )
    if any(map(bool, none)) or not isclose(float(whole), float(sum(parts)), rel_tol=_ALIKE):
        raise InputError(
            f"Trainer.{own.of.name}: it divides by {ITEMS}, and its losses of some labels and of the others, where the "
            f"rest are {IGNORED} or other samples, do not add up to that of all labels; let it be a sum over the "
            f"labels that are not {IGNORED}"
        )
    return SUMMED_ITEMS


def _random(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random numbers; whole ones are 0 or 1."""
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), dtype=dtype, generator=generator)
    return torch.randint(2, tuple(shape), generator=generator).to(dtype)


def _scaled(values: Any, factor: float) -> Any:
    def scaled(value: torch.Tensor) -> torch.Tensor:
        return (factor * value).to(value.dtype)

    return tree_map_only(torch.Tensor, scaled, values)


def _not_tried(own: OwnLoss, error: Exception) -> InputError:
    return InputError(
        f"Trainer.{own.of.name}: what it does with {ITEMS} cannot be tried on random outputs of the model "
        f"({explain(error)}); let it use its arguments only, as tensors"
    )


def _reads_items(own: OwnLoss) -> bool:
    """Whether the code of a script's loss may read the number of items, or hand it on."""
    code = getattr(inspect.unwrap(own.of.call), "__code__", None)
    if code is None:
        return True
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    names = {ITEMS, *code.co_varnames[count : count + 1]} if code.co_flags & inspect.CO_VARKEYWORDS else {ITEMS}
    return any(step.opname.startswith("LOAD") and step.argval in names for step in get_instructions(code))


def _may_divide(model: nn.Module) -> bool:
    """Whether a forward in ``model`` names the number of items, or a loss function of transformers, which divides."""
    forwards = {type(part).forward for part in model.modules()}
    texts = []
    for forward in filter(inspect.isfunction, forwards):
        with suppress(OSError):  # no file has the code
            texts.append(inspect.getsource(forward))
    return any(ITEMS in text or "self.loss_function(" in text for text in texts)
