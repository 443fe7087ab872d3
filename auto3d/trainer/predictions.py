"""Evaluation in the pipeline as transformers reports it: losses by batch, predictions, labels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from auto3d.capture.empty import empty_model
from auto3d.capture.export import ExportedModel, quiet_torch
from auto3d.capture.model import CapturedModel
from auto3d.data.interface import IGNORED
from auto3d.errors import InputError
from auto3d.trainer.instance import two_samples
from auto3d.trainer.samples import items_of


def output_names(captured: CapturedModel, ignored: Sequence[str]) -> tuple[str, ...]:
    """The entries of the model's result that are predictions: all tensors but the loss and those ``ignored``."""
    exported = captured.exported
    results = _results_without_values(exported) or captured.in_evaluation().exported.results
    names = [name for name, kind in results.items() if name not in ("loss", *ignored)]
    for name in names:
        if not issubclass(results[name], torch.Tensor):
            raise InputError(f"Trainer: output {name} is a {results[name].__name__}; a prediction is one tensor")
    return tuple(names)


def _results_without_values(exported: ExportedModel) -> dict[str, type]:
    """What the model's result in an evaluation holds; nothing if its code needs values, such as a choice of experts."""
    model = empty_model(exported.build, exported.device)
    model.module.eval()
    arguments = two_samples(model, exported.inputs)
    padded = patch.object(torch.backends.mha, "get_fastpath_enabled", lambda: False)  # nested tensors need values
    try:
        with torch.no_grad(), model.mode, padded, quiet_torch():
            result = model.module(**arguments)
    except Exception:
        return {}
    if not isinstance(result, Mapping):
        raise InputError(
            f"Trainer: {type(model.module).__name__} returns a {type(result).__name__}, whose entries have no names; "
            "return a dict or a ModelOutput, or evaluate without compute_metrics"
        )
    return {name: type(value) for name, value in result.items() if value is not None}


def mean_loss(
    losses: Sequence[float],
    targets: Sequence[float],
    at_once: int,
    batch: int,
    labels: Sequence[np.ndarray],
    *,
    shifted: bool,
    first_item: int | None,
    finite: bool,
) -> float:
    """The loss that transformers reports: the mean over samples of the loss of each one's batch.

    ``losses`` has the mean over the real ``targets`` of each ``at_once`` samples. The loss of a batch is their sum,
    divided by the number of these targets or, with ``first_item``, by that which transformers counts in ``labels``.
    Raises InputError where batches are no multiple of what runs at once and it would not be exact.
    """
    samples = len(labels[0]) if labels else len(losses) * at_once
    if batch % at_once:
        if labels:
            check_uniform(labels[0], at_once, batch, shifted=shifted)
        batch = at_once
    total, counted = 0.0, 0
    for first in range(0, samples, batch):
        end = min(samples, first + batch)
        each = [(losses[start // at_once], targets[start // at_once]) for start in range(first, end, at_once)]
        weight = sum(count for _, count in each)
        if first_item is not None:
            weight = int(items_of({"labels": torch.from_numpy(labels[0][first:end])}, first_item))
        mean = sum(loss * count for loss, count in each if count) / weight if weight else float("nan")
        if np.isfinite(mean) or not finite:
            total, counted = total + mean * (end - first), counted + end - first
    return total / counted if counted else float("nan")


def check_uniform(labels: np.ndarray, at_once: int, batch: int, *, shifted: bool) -> None:
    """Raise InputError if samples have unequally many targets, and a ``batch`` is no multiple of what runs at once."""
    if len(set(_targets(labels, shifted=shifted).tolist())) > 1:
        raise InputError(
            f"TrainingArguments.per_device_eval_batch_size: found {batch}; samples have different numbers of "
            f"targets, and {at_once} samples run at once, so it must be a multiple of {at_once}"
        )


def _targets(labels: np.ndarray, *, shifted: bool) -> np.ndarray:
    """The number of real targets of each sample."""
    if not np.issubdtype(labels.dtype, np.integer):
        return np.ones(len(labels))
    counted = labels[..., 1:] if shifted and labels.ndim > 1 else labels
    return (counted.reshape(len(labels), -1) != IGNORED).sum(axis=1)


def in_batches(process: Callable[..., Any], outputs: torch.Tensor, labels: Any, batch: int) -> torch.Tensor:
    """``preprocess_logits_for_metrics`` applied to each batch, as transformers does."""
    whole = [None if labels is None else torch.from_numpy(each) for each in (labels or (None,))]
    processed = []
    for first in range(0, len(outputs), batch):
        given = [None if each is None else each[first : first + batch] for each in whole]
        processed.append(process(outputs[first : first + batch], given[0] if len(given) == 1 else tuple(given)))
    return torch.cat(processed)
