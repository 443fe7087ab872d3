"""Checks of a dataset before its training starts, through the same road that the training takes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from math import isclose, isfinite
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from auto3d.data.fingerprint import fingerprints
from auto3d.errors import InputError
from auto3d.runtime.waiting import waiting_for
from auto3d.trainer.instance import build_of
from auto3d.trainer.padding import Padding
from auto3d.trainer.rank_zero import of_rank_0
from auto3d.trainer.samples import CollatedData, bytes_of
from auto3d.trainer.stream import Stream

MOST_FLOPS = 1e11  # a forward that only a check runs has no more
_PADDED = 2  # samples that are padded to see whether that counts
_TRIED = 4  # pairs of samples that are tried of any dataset
_MOST_NUMBERS = 3 * 10**8  # parameters of a model that a check copies
_EQUAL = 1e-6  # difference in float64 of what is equal; models compute some of it in float32
ALIKE = 1e-4  # difference of two losses that rounding may explain


def check_samples(data: CollatedData, main: str) -> None:
    """Raise InputError if the longest or shortest sample, or the one with the largest or smallest token, cannot train.

    Rank 0 finds them where that is cheap: in a list of dicts, and in a column of a ``datasets.Dataset``. A few others
    are tried of any dataset; its other batches are checked when they are loaded. All ranks must call it.
    """
    if data.constants:
        data.check(data.order.of(0)[:1])  # they may be the constants of as many samples as were looked at first
    positions = of_rank_0(lambda: extremes(data.dataset, main), "to look through the dataset")
    for position in positions:
        try:
            data.check([position])
        except InputError as error:
            raise InputError(f"dataset: sample {position}: {error}") from None
    count = len(data.dataset) if hasattr(data.dataset, "__len__") else 0
    for first in range(0, count - 1, max(2, count // _TRIED)):
        try:
            data.check([first, first + 1])  # a collator may need several
        except InputError as error:
            raise InputError(f"dataset: samples {first} and {first + 1}: {error}") from None


def check_same_data(data: CollatedData, name: str) -> None:
    """Raise InputError, on every rank, if ranks have other numbers of samples, another order, or other samples at the
    ends.

    All ranks must call it. Of a stream they compare the first samples. Samples in between are compared when they are
    read.
    """
    order = [*map(int, data.order.of(0))]
    ends = [] if isinstance(data.dataset, Stream) else [len(data.dataset) - 1]
    samples = sorted({*order[:2], *ends})
    of_samples = data.fingerprints(samples, [0, 0])
    if of_samples is None:
        of_samples = fingerprints(bytes_of(data.collated(samples, [0, 0])))
    mine = (ends[0] + 1 if ends else 0, order, of_samples.tolist())
    of_ranks = [mine] * dist.get_world_size()
    with waiting_for(f"the fingerprints of all ranks' {name}"):
        dist.all_gather_object(of_ranks, mine)
    for rank, other in enumerate(of_ranks):
        if other == mine:
            continue
        what = "other samples at the same positions"
        if other[0] != mine[0]:
            what = " and ".join(map(str, sorted((mine[0], other[0])))) + " samples"
        elif other[1] != mine[1]:
            what = "another order of samples"
        first, second = sorted((dist.get_rank(), rank))
        raise InputError(
            f"{name}: ranks {first} and {second} have {what}; seed what draws or shuffles it, sort what comes "
            "from a set or a folder, and give every rank the same data: the plan divides them"
        )


def check_padding(model: nn.Module, loss_of: Callable[..., Any], data: CollatedData, main: str) -> None:
    """Raise InputError if the loss of the shortest sample is another one where it is padded.

    It is one where ``model`` takes places that are padded into account, such as a mean over all of them. ``loss_of``
    takes the model and a batch. Nothing is compared where that is not cheap, fails, or gives no number.
    """
    parameters = list(model.parameters())
    padding = data.padding
    if padding is None or any(parameter.is_meta for parameter in parameters):
        return
    shortest = min(extremes(data.dataset, main), key=lambda place: len(data.dataset[place][main]), default=None)
    if shortest is None or 2 * padding.length * sum(parameter.numel() for parameter in parameters) > MOST_FLOPS:
        return
    was_training = [part for part in model.modules() if part.training]
    model.eval()
    losses = [float("nan")]
    try:
        with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=()):
            plain = replace(data, padding=None).collated([shortest], [0, 0])
            losses = [float(loss_of(model, {**batch, **data.constants})) for batch in (plain, padding(plain))]
    finally:
        for part in was_training:
            part.training = True
    if all(map(isfinite, losses)) and not isclose(*losses, rel_tol=ALIKE, abs_tol=ALIKE):
        raise InputError(
            f"TrainingArguments.sequence_length: the loss of sample {shortest} is {losses[0]:.6g}, and {losses[1]:.6g} "
            f"where it is padded to {padding.length}: the model takes places into account that its attention_mask "
            "leaves out; let it mask them, or make all samples equally long"
        )


def needs_mask(model: nn.Module, loss_of: Callable[..., Any], data: CollatedData, padding: Padding) -> bool:
    """Whether ``padding`` behind the samples of ``data`` would count, since their collator gives no attention_mask.

    It does not where tokens attend to earlier ones alone, and labels of padding are ignored. That is tried with a copy
    of ``model`` in float64, with noise added to its weights so that none of them is zero: if its loss or an output is a
    function of padding, they differ. Padding is said to count where that would not be cheap, where the model cannot be
    run so, and where it takes statistics of a batch. ``loss_of`` takes the model and a batch, and with return_outputs
    gives (the loss, the outputs).
    """
    numbers = sum(weight.numel() for weight in model.parameters())
    is_costly = numbers > _MOST_NUMBERS or 2 * padding.length * numbers > MOST_FLOPS
    takes_statistics = any(isinstance(part, _BatchNorm) for part in model.modules())
    if padding.left or is_costly or takes_statistics or any(weight.is_meta for weight in model.parameters()):
        return True
    count = len(data.dataset) if hasattr(data.dataset, "__len__") else 2
    places = [*extremes(data.dataset, padding.main), *range(0, count, max(1, count // _TRIED))]
    plain, padding, alike = replace(data, padding=None), replace(padding, needs_mask=False), list[bool]()
    with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=()):
        batches = (plain.collated([place], [0, 0]) for place in places)
        padded = (short for short in batches if short[padding.main].shape != padding(short)[padding.main].shape)
        shorter = list(islice(padded, _PADDED))
        if not shorter or any("attention_mask" in batch for batch in shorter):
            return True
        noisy = build_of(model)().cpu().double().eval()
        torch.manual_seed(0)
        for parameter, value in zip(noisy.parameters(), model.parameters(), strict=True):
            noise = torch.randn_like(parameter) / (parameter.shape[-1] if parameter.dim() > 1 else 1) ** 0.5
            parameter.copy_(value + noise if parameter.is_floating_point() else value)
        for batch in shorter:
            given = ({**values, **data.constants} for values in (batch, padding(batch)))
            results = [loss_of(noisy, values, return_outputs=True) for values in given]
            pairs = zip(*([loss, *tree_leaves([*_values(outputs)])] for loss, outputs in results), strict=True)
            alike.append(all(_is_beginning(*pair) for pair in pairs if isinstance(pair[0], torch.Tensor)))
        return not all(alike)
    return True


def _values(outputs: Any) -> Any:
    return outputs.values() if isinstance(outputs, Mapping) else outputs


def _is_beginning(value: torch.Tensor, longer: torch.Tensor) -> bool:
    """Whether ``value`` [samples, tokens, …] is equal to ``longer`` as far as it goes."""
    if value.dim() > 1:
        longer = longer[:, : value.shape[1]]
    return value.shape == longer.shape and torch.allclose(value, longer, rtol=_EQUAL, atol=_EQUAL)


def extremes(dataset: Any, main: str) -> list[int]:
    """Positions of the shortest and the longest sample by their ``main``, and of its smallest and largest entry."""
    column: Any = None
    if isinstance(dataset, list | tuple):
        if all(isinstance(sample, dict) and main in sample for sample in dataset):
            column = (sample[main] for sample in dataset)
    elif main in (getattr(dataset, "column_names", None) or ()) and hasattr(dataset, "with_format"):
        plain = dataset.with_format("numpy", columns=[main])
        column = (row for batch in plain.iter(1000) for row in batch[main])
    if column is None:
        return []
    rows = ((len(row), row.min(), row.max()) for row in map(np.asarray, column) if row.ndim == 1 and row.size)
    try:
        table = np.array(list(rows))
    except ValueError:  # rows of several texts, which are not equally long
        return []
    if len(table) != len(dataset) or not np.issubdtype(table.dtype, np.integer):
        return []
    lengths, smallest, largest = table.T
    return sorted({int(lengths.argmin()), int(lengths.argmax()), int(smallest.argmin()), int(largest.argmax())})


def limits_of(model: nn.Module, main: str, label_names: Sequence[str]) -> dict[str, int]:
    """The number of different values of each integer input of ``model`` for which it is known."""
    limits: dict[str, int] = {}
    if main == "input_ids" and hasattr(model, "get_input_embeddings"):
        find: Any = model.get_input_embeddings
        table = None
        with suppress(NotImplementedError):  # transformers raises it for a model of several towers, such as CLIP
            table = find()
        if isinstance(table, nn.Embedding):
            limits[main] = table.num_embeddings
    head = getattr(model, "get_output_embeddings", lambda: None)()
    loss, config = getattr(model, "loss_type", None), getattr(model, "config", None)
    if isinstance(head, nn.Linear) and len(label_names) == 1:
        limits[label_names[0]] = head.out_features
    elif loss in ("ForSequenceClassification", "ForTokenClassification") and len(label_names) == 1:
        limits[label_names[0]] = config.num_labels  # type: ignore[union-attr]  # such a model has a config
    return limits
