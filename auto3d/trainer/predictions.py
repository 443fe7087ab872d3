"""Evaluation in the pipeline as transformers reports it: losses by batch, predictions, labels."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from auto3d.capture.empty import empty_model
from auto3d.capture.errors import explain
from auto3d.capture.export import InputSpec
from auto3d.data.interface import IGNORED
from auto3d.errors import InputError
from auto3d.trainer.instance import run_without_values
from auto3d.trainer.samples import items_of

Predictions = tuple[Any, ...]
"""The predictions of a model: the entries of its result, each a tensor or a tuple of such entries. Names of outputs may
stand for the tensors."""


def predictions_of(
    build: Callable[[], nn.Module], inputs: Mapping[str, InputSpec], ignored: Sequence[str], *, device: str
) -> Predictions:
    """The names of the outputs that are predictions: all of the model's result but the loss and those ``ignored``."""
    model = empty_model(build, device)
    model.module.eval()
    try:
        result = run_without_values(model, inputs)
    except Exception as error:
        raise InputError(
            f"Trainer: the outputs of {type(model.module).__name__} cannot be found out, since its forward needs "
            f"values ({explain(error)}); evaluate without compute_metrics"
        ) from None
    if isinstance(result, Mapping):
        entries = {name: value for name, value in result.items() if value is not None}
    elif isinstance(result, tuple | list) and torch.is_tensor(result[0]) and not result[0].dim():
        entries = {str(place): value for place, value in enumerate(result) if place}  # the first is the loss
    else:
        raise InputError(
            f"Trainer: {type(model.module).__name__} returns a {type(result).__name__}; return a dict, a ModelOutput or"
            " a tuple whose first entry is the loss, or evaluate without compute_metrics"
        )
    return tuple(_named(name, value) for name, value in entries.items() if name not in ("loss", *ignored))


def outputs_of(result: Any) -> dict[str, torch.Tensor]:
    """The tensors in a model's ``result``, by their names."""
    entries = [*result.items()] if isinstance(result, Mapping) else [(str(n), entry) for n, entry in enumerate(result)]
    tensors: dict[str, torch.Tensor] = {}
    while entries:
        name, value = entries.pop()
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, tuple | list):
            entries += [(f"{name}.{place}", entry) for place, entry in enumerate(value)]
    return tensors


def stand_in_labels(
    build: Callable[[], nn.Module], inputs: Mapping[str, InputSpec], names: Sequence[str], *, device: str
) -> dict[str, InputSpec]:
    """Labels with which the model has a loss, as its capture needs, for samples without labels.

    They may be of another kind than the model's own, and only what does not depend on them may be computed. None stand
    in where the model has a loss without labels, or with no kind that is tried.
    """
    if len(names) != 1:
        return {}
    model = empty_model(build, device)
    model.module.eval()
    classes = getattr(getattr(model.module, "config", None), "num_labels", 1)
    of_places = [spec.shape for spec in inputs.values() if spec.dtype == torch.int64 and spec.shape]
    integers = (InputSpec(shape=shape, dtype=torch.int64) for shape in (*dict.fromkeys(of_places), ()))
    numbers = (InputSpec(shape=shape, dtype=torch.float32) for shape in ((classes,), ()))
    for labels in ({}, *({names[0]: spec} for spec in (*integers, *numbers))):
        with suppress(Exception):
            result = run_without_values(model, {**inputs, **labels})
            loss = result.get("loss") if isinstance(result, Mapping) else result[0]
            if loss is not None and not loss.dim() and loss.is_floating_point():
                return labels
    return {}


def _named(name: str, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_named(f"{name}.{place}", entry) for place, entry in enumerate(value))
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"Trainer: output {name} is a {type(value).__name__}; a prediction is a tensor, or a tuple of tensors"
        )
    return name


def losses_of_samples(
    losses: Sequence[float],
    targets: Sequence[float],
    at_once: int,
    batch: int,
    labels: Sequence[np.ndarray],
    *,
    samples: int,
    first_item: int | None,
) -> np.ndarray:
    """The loss of the batch of each of so many ``samples``, [samples], whose mean transformers reports.

    ``losses`` has the mean over the real ``targets`` of each ``at_once`` samples, a part of a ``batch``. The loss of a
    batch is their sum, divided by the number of these targets or, with ``first_item``, by that which transformers
    counts in ``labels``.
    """
    of_samples = np.empty(samples)
    for first in range(0, samples, batch):
        end = min(samples, first + batch)
        parts = [(losses[start // at_once], targets[start // at_once]) for start in range(first, end, at_once)]
        weight = sum(count for _, count in parts)
        if first_item is not None:
            weight = int(items_of({"labels": torch.from_numpy(labels[0][first:end])}, first_item))
        of_samples[first:end] = sum(loss * count for loss, count in parts if count) / weight if weight else float("nan")
    return of_samples


def in_batches(process: Callable[..., Any], batches: Sequence[tuple[Predictions, Any]]) -> Predictions:
    """``preprocess_logits_for_metrics`` applied to the outputs and labels of each batch, as transformers does."""
    processed = [process(*map(one_or_tuple, batch)) for batch in batches]
    whole = tree_map(lambda *parts: concatenated(parts), *processed)
    return whole if isinstance(whole, tuple) else (whole,)


def concatenated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All ``parts`` one after the other, with IGNORED where their second dimension is smaller than the largest."""
    if len({part.shape[1:2] for part in parts}) == 1:
        return torch.cat(list(parts))
    width = max(part.shape[1] for part in parts)
    whole = parts[0].new_full((sum(map(len, parts)), width, *parts[0].shape[2:]), IGNORED)
    first = 0
    for part in parts:
        whole[first : first + len(part), : part.shape[1]] = part
        first += len(part)
    return whole


def one_or_tuple(entries: Sequence[Any]) -> Any:
    """As transformers has predictions and labels: a single one by itself; None if there are none."""
    return (entries[0] if len(entries) == 1 else tuple(entries)) if entries else None
