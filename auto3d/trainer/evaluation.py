"""An evaluation or prediction in the pipeline, as the numbers that transformers reports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map
from transformers.trainer_utils import EvalPrediction, denumpify_detensorize

from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.evaluation.run import EvaluationResult, evaluate, prepare_evaluation
from auto3d.runtime.settings import SUMMED_ITEMS
from auto3d.runtime.training import Training
from auto3d.schedule import samples_at_once
from auto3d.trainer.arguments import TrainingArguments
from auto3d.trainer.pipeline import Pipeline
from auto3d.trainer.predictions import (
    Predictions,
    concatenated,
    in_batches,
    losses_of_samples,
    one_or_tuple,
    predictions_of,
)
from auto3d.trainer.rank_zero import of_rank_0
from auto3d.trainer.samples import CollatedData, InOrder
from auto3d.trainer.widths import Widths, lengthened, widths_of


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A dataset that went through the pipeline; the same on every rank."""

    predictions: Any  # an array [samples, …], a tuple of them, or None if none were asked for
    label_ids: Any  # likewise; None if the samples have no labels
    losses: Sequence[float] | None  # mean over the real targets of each ``at_once`` samples, or their sum
    targets: Sequence[float]  # how many these are; 1 for a sum
    labels: tuple[np.ndarray, ...]
    inputs: np.ndarray | None  # main input of each sample, if metrics are to get it
    samples: int
    at_once: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation computes, checked without running it."""

    samples: int
    predictions: Predictions  # the names of the outputs that are predictions
    has_labels: bool
    has_loss: bool  # a model may have one of samples without labels
    at_once: int  # samples that run at once
    last: int  # samples at the end that run by themselves, since nothing can fill a batch of them
    alike: bool = False  # the loss of the samples that run at once is the model's own, however many targets they have
    of_decoder: Mapping[str, bool] = field(default_factory=dict)  # see Widths; empty: no padding


def check_evaluation(
    pipeline: Pipeline,
    data: CollatedData,
    args: TrainingArguments,
    *,
    samples: int,
    loss_only: bool,
    ignored: Sequence[str],
) -> Evaluation:
    """The evaluation of the first ``samples`` of ``data`` in the pipeline, which has started; all ranks must call it.

    Raises InputError where samples have neither labels nor predictions, or other shapes than those that the model was
    captured for, where the loss would count samples that fill a batch, and where the model cannot be evaluated.
    """
    assert pipeline.training is not None
    has_labels, has_loss = data.has_labels, data.has_loss
    if not has_loss and loss_only:
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
    plan, terms = pipeline.training.rank.common.plan, pipeline.training.rank.common.terms
    at_once, last = samples_at_once(plan), 0
    counts_items = pipeline.settings.loss_mean == "items"  # transformers divides by the items of a batch
    # Terms that ignore different labels have no weight in common: a batch then runs whole, as in one process.
    is_whole = bool(terms.other) or (len((*terms.counted, *terms.constant)) > 1 and not counts_items)
    alike = is_whole and not counts_items
    if has_loss:
        at_once = _at_once(plan, args.per_device_eval_batch_size, whole=is_whole)
        if counted := data.why_filler_counts(-samples % at_once, terms):
            last = samples % at_once
            if not _divide(plan, last):
                raise InputError(counted)
    names: Predictions = ()
    if not loss_only:
        names = predictions_of(pipeline.build, pipeline.inputs, ignored, device=args.device.type)
    for size in (at_once, last) if last else (at_once,):
        needed = prepare_evaluation(
            pipeline.training, outputs=tree_leaves(names), loss=has_loss, at_once=size, alike=alike
        )
        if missing := sorted(needed - data.shapes.keys()):
            raise InputError(
                f"Trainer: the samples have no {' and '.join(missing)}, and what the model is to compute depends on "
                "that"
            )
    of_decoder = {}
    if names and data.padding is not None:
        of_decoder = lengthened(pipeline.build, pipeline.inputs, data.padding, device=args.device.type)
    return Evaluation(
        samples=samples,
        predictions=names,
        has_labels=has_labels,
        has_loss=has_loss,
        at_once=at_once,
        last=last,
        alike=alike,
        of_decoder=of_decoder,
    )


def _at_once(plan: Plan, batch: int, *, whole: bool) -> int:
    """How many samples run at once, by which a ``batch`` can be divided, or all of it if it is to run ``whole``.

    Raises InputError if replicas of a stage cannot share so many.
    """
    trained = samples_at_once(plan)
    if not batch % trained and not (whole and batch > trained):
        return trained
    sizes = (batch,) if whole else range(trained, 0, -1)
    at_once = next((size for size in sizes if not batch % size and _divide(plan, size)), None)
    if at_once is None:
        replicas = " and ".join(map(str, sorted({stage.replicas for stage in plan.stages} - {1})))
        raise InputError(
            f"TrainingArguments.per_device_eval_batch_size: found {batch}; it must be a multiple of {replicas}, the "
            "replicas of stages, which share the samples that run at once"
        )
    return at_once


def _divide(plan: Plan, samples: int) -> bool:
    """Whether the replicas of each stage can share so many samples."""
    return all(samples % stage.replicas == 0 for stage in plan.stages)


def evaluated(
    pipeline: Pipeline,
    data: CollatedData,
    args: TrainingArguments,
    evaluation: Evaluation,
    *,
    preprocess: Callable[..., torch.Tensor] | None,
    main_input: str | None = None,
) -> Evaluated:
    """Run ``evaluation`` of ``data`` in the pipeline; all ranks must call it.

    The predictions are the model's outputs after ``preprocess``. The input ``main_input`` is kept for metrics.
    """
    assert pipeline.training is not None
    samples, has_labels = evaluation.samples, evaluation.has_labels
    kept = data.label_names if has_labels else ()
    asked = (*kept, *([main_input] if main_input else []))
    parts = _run(pipeline.training, data, evaluation, asked)
    batch = args.per_device_eval_batch_size
    # A collator may draw: metrics must get the labels of the draw that the stages have read.
    if unread := [name for name in asked if name not in parts[0].inputs]:
        raise InputError(f"Trainer: the model does not use {' and '.join(unread)}, so no stage reads it; leave it out")
    widths = None
    if evaluation.of_decoder:
        tokens = of_rank_0(lambda: widths_of(data, batch), "to collate")
        widths = Widths(batches=tokens, of_decoder=evaluation.of_decoder, left=data.padding.left)  # type: ignore[union-attr]

    def cut(name: str, values: Sequence[torch.Tensor], number: int) -> torch.Tensor:
        value = _rows(values, number * batch, min(samples, (number + 1) * batch))
        return value if widths is None else widths.cut(name, value, number)

    def of_batch(number: int) -> tuple[Any, Any]:
        return (
            tree_map(lambda name: cut(name, [part.outputs[name] for part in parts], number), evaluation.predictions),
            tuple(cut(name, [part.inputs[name] for part in parts], number) for name in kept),
        )

    batches = [of_batch(number) for number in range(-(-samples // batch))]
    predictions = tree_map(lambda *parts: concatenated(parts), *(outputs for outputs, _ in batches))
    labels = tuple(concatenated(parts) for parts in zip(*(row for _, row in batches), strict=True))
    if preprocess is not None and predictions:
        predictions = in_batches(preprocess, batches)
    inputs = None
    if main_input:
        inputs = concatenated(
            [cut(main_input, [part.inputs[main_input] for part in parts], number) for number in range(len(batches))]
        ).numpy()
    of_labels = tuple(part.numpy() for part in labels)
    is_summed = pipeline.settings.loss_mean == SUMMED_ITEMS
    losses = [loss for part in parts for loss in part.losses]
    targets = [count for part in parts for count in part.targets]
    return Evaluated(
        predictions=one_or_tuple(tree_map(torch.Tensor.numpy, predictions)),
        label_ids=one_or_tuple(of_labels) if has_labels or not evaluation.has_loss else (),
        losses=losses if evaluation.has_loss else None,
        targets=[1.0] * len(losses) if is_summed else targets,
        labels=of_labels,
        inputs=inputs,
        at_once=evaluation.at_once,
        samples=samples,
    )


def _rows(parts: Sequence[torch.Tensor], begin: int, end: int) -> torch.Tensor:
    """Rows ``begin`` to ``end`` of the ``parts`` one after the other."""
    rows, first = [], 0
    for part in parts:
        rows.append(part[max(begin - first, 0) : max(end - first, 0)])
        first += len(part)
    return concatenated([piece for piece in rows if len(piece)])


def _run(training: Training, data: CollatedData, evaluation: Evaluation, kept: Sequence[str]) -> list[EvaluationResult]:
    """What the pipeline gives, and the inputs called ``kept``, of samples that follow each other; all ranks must call
    it."""
    samples, at_once, last = evaluation.samples, evaluation.at_once, evaluation.last
    plan, outputs = training.rank.common.plan, tree_leaves(evaluation.predictions)

    def run(samples: int, size: int, first: int = 0) -> EvaluationResult:
        """Of so many samples from number ``first`` on, of which ``size`` run at once."""
        assert isinstance(data.order, InOrder)
        global_batch = plan.global_batch * size // samples_at_once(plan)
        own = replace(data, order=replace(data.order, global_batch=global_batch, first=first))
        return evaluate(
            training,
            own,
            samples=samples,
            outputs=outputs,
            inputs=kept,
            loss=evaluation.has_loss,
            at_once=size,
            alike=evaluation.alike,
        )

    if not last:
        return [run(samples + -samples % at_once if evaluation.has_loss else samples, at_once)]
    before = [run(samples - last, at_once)] if samples > last else []
    return [*before, run(last, last, samples - last)]


def metrics_of(
    result: Evaluated,
    args: TrainingArguments,
    *,
    compute: Callable[..., dict] | None,
    first_item: int | None,
    prefix: str,
    fills: bool,
) -> dict[str, Any]:
    """What ``compute`` gives on rank 0, and the mean loss, each under its name after ``prefix``. All ranks call it.

    ``first_item`` is CollatedData's. If it ``fills``, the loss of a last batch in part counts as often as the loss of a
    whole batch: transformers repeats it so, and cuts that off where accelerate has prepared the loader.
    """
    metrics: dict[str, Any] = {}
    losses = None
    if result.losses is not None:
        losses = losses_of_samples(
            result.losses,
            result.targets,
            result.at_once,
            args.per_device_eval_batch_size,
            result.labels,
            samples=result.samples,
            first_item=first_item,
        )
        if fills:
            losses = np.append(losses, losses[-1:].repeat(-len(losses) % args.per_device_eval_batch_size))
    if compute is not None and result.predictions is not None and result.label_ids is not None:
        batch = args.per_device_eval_batch_size if args.batch_eval_metrics else None
        given = losses.astype(np.float32) if losses is not None and "loss" in args.include_for_metrics else None
        metrics = of_rank_0(
            lambda: denumpify_detensorize(_computed(compute, result, batch, given)), "to compute the metrics"
        )
    # In the order of transformers, where a loss of the script's replaces the mean one.
    named = {name: value for name, value in metrics.items() if name.startswith(prefix)}
    if losses is not None:
        counted = losses[np.isfinite(losses)] if args.logging_nan_inf_filter else losses
        named[f"{prefix}loss"] = float(counted.mean()) if len(counted) else float("nan")
    return named | {f"{prefix}{name}": value for name, value in metrics.items() if not name.startswith(prefix)}


def _computed(
    compute: Callable[..., dict], result: Evaluated, batch: int | None, losses: np.ndarray | None
) -> dict[str, Any]:
    """What ``compute`` makes of all samples; with ``batch``, of tensors of so many at a time, as in transformers."""
    if batch is None:
        return compute(EvalPrediction(result.predictions, result.label_ids, inputs=result.inputs, losses=losses))
    metrics: dict[str, Any] = {}
    samples = len(tree_leaves(result.predictions)[0])
    for first in range(0, samples, batch):
        predictions, labels = tree_map(
            lambda values, first=first: torch.from_numpy(values[first : first + batch]),
            (result.predictions, result.label_ids),
        )
        metrics = compute(EvalPrediction(predictions, labels), compute_result=first + batch >= samples)
    return metrics
