"""An evaluation or prediction in the pipeline, as the numbers that transformers reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.trainer_utils import EvalPrediction, denumpify_detensorize

from auto3d.errors import InputError
from auto3d.runtime.evaluation import evaluate
from auto3d.schedule import samples_at_once
from auto3d.trainer.arguments import TrainingArguments
from auto3d.trainer.pipeline import Pipeline
from auto3d.trainer.predictions import in_batches, mean_loss, output_names
from auto3d.trainer.rank_zero import of_rank_0
from auto3d.trainer.samples import CollatedData


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A dataset that went through the pipeline; the same on every rank."""

    predictions: Any  # an array [samples, …], a tuple of them, or None if none were asked for
    label_ids: Any  # likewise; None if the samples have no labels
    losses: Sequence[float] | None  # mean over the real targets of each ``at_once`` samples
    labels: tuple[np.ndarray, ...]
    at_once: int


def evaluated(
    pipeline: Pipeline,
    data: CollatedData,
    args: TrainingArguments,
    *,
    samples: int,
    loss_only: bool,
    ignored: Sequence[str],
    preprocess: Callable[..., torch.Tensor] | None,
) -> Evaluated:
    """Run the first ``samples`` of ``data`` through the pipeline, which has started; all ranks must call it.

    The predictions are the model's outputs but ``ignored``, after ``preprocess``. Raises InputError where samples have
    neither labels nor predictions, or other shapes than those that the model was captured for.
    """
    assert pipeline.training is not None
    has_labels = bool(data.label_names) and all(name in data.shapes for name in data.label_names)
    if not has_labels and loss_only:
        raise InputError(
            f"Trainer.evaluate: the samples have no {' and '.join(data.label_names) or 'labels'}, so there is no "
            "loss, and without compute_metrics nothing else to report"
        )
    for name, spec in data.shapes.items():
        if name in pipeline.inputs and pipeline.inputs[name] != spec:
            raise InputError(
                f"Trainer: {name} of a sample has shape {list(spec.shape)}; the model was captured for "
                f"{list(pipeline.inputs[name].shape)}: pad all samples to TrainingArguments.sequence_length"
            )
    at_once = samples_at_once(pipeline.training.rank.common.plan)
    whole = -(-samples // at_once) * at_once if has_labels else samples
    data.check_fill(whole - samples, pipeline.training.rank.common.terms)
    names = () if loss_only else output_names(pipeline.build, pipeline.inputs, ignored, device=args.device.type)
    kept = data.label_names if has_labels else ()
    result = evaluate(pipeline.training, data, samples=whole, outputs=names, inputs=kept, loss=has_labels)
    batch = args.per_device_eval_batch_size
    # A collator may draw: metrics must get the labels of the draw that the stages have read.
    if unread := [name for name in kept if name not in result.inputs]:
        raise InputError(f"Trainer: the model does not use {' and '.join(unread)}, so no stage reads it; leave it out")
    labels = tuple(result.inputs[name][:samples].numpy() for name in kept)
    predictions = [result.outputs[name][:samples] for name in names]
    if preprocess is not None and predictions:
        if len(predictions) > 1:
            raise InputError(f"Trainer: preprocess_logits_for_metrics takes one output; the model has {names}")
        predictions = [in_batches(preprocess, predictions[0], labels or None, batch)]
    return Evaluated(
        predictions=_one_or_tuple([each.numpy() for each in predictions]),
        label_ids=_one_or_tuple(labels),
        losses=result.losses if has_labels else None,
        labels=labels,
        at_once=at_once,
    )


def metrics_of(
    result: Evaluated,
    args: TrainingArguments,
    *,
    compute: Callable[..., dict] | None,
    loss_type: str | None,
    prefix: str,
) -> dict[str, Any]:
    """What ``compute`` gives on rank 0, and the mean loss, each under its name after ``prefix``. All ranks call it."""
    metrics: dict[str, Any] = {}
    if compute is not None and result.predictions is not None and result.label_ids is not None:
        given = EvalPrediction(predictions=result.predictions, label_ids=result.label_ids)
        metrics = of_rank_0(
            lambda: denumpify_detensorize(compute(given)), "to compute the metrics", timeout_s=args.ddp_timeout
        )
    if result.losses is not None:
        metrics["loss"] = mean_loss(
            result.losses,
            result.at_once,
            args.per_device_eval_batch_size,
            result.labels,
            shifted=LOSS_MAPPING.get(loss_type or "ForCausalLM") is ForCausalLMLoss,
            finite=args.logging_nan_inf_filter,
        )
    return {name if name.startswith(prefix) else prefix + name: value for name, value in metrics.items()}


def _one_or_tuple(arrays: Sequence[np.ndarray]) -> Any:
    """As transformers returns predictions and labels."""
    return (arrays[0] if len(arrays) == 1 else tuple(arrays)) if arrays else None
