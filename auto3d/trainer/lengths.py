"""How long samples are: a captured model has fixed shapes, to which the samples of other lengths are padded."""

from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any

import numpy as np

from auto3d.errors import InputError
from auto3d.trainer.padding import Padding
from auto3d.trainer.samples import CollatedData
from auto3d.trainer.stream import is_stream

MOST = 4  # lengths at which a model is captured: each takes as long as the first
_WORTH = 0.1  # fraction of the tokens that another length must save
_STEP = 8  # lengths to capture are multiples of it, which kernels of GPUs need to be fast

_FIRST_OF_STREAM = 64  # samples of a stream that are looked at
_DRAWN_AGAIN = 8  # samples of which it is tried whether their length is drawn
_PATIENCE_S = 10.0  # reading samples one by one, all of which are equally long, ends then


def lengths_of(data: CollatedData, padding: Padding) -> np.ndarray | None:
    """[samples] the tokens of each sample of ``data``, which are not padded, as their collator makes it by itself.

    ``padding`` says which inputs are sequences. None: there are none, or nothing is known of them, as of a stream.
    Raises InputError if lengths differ, and the collator makes no batch of such samples.
    """
    if is_stream(data.dataset) or not len(data.dataset) or _length(data, padding, 0) is None:
        return None
    lengths = _column_lengths(data.dataset, padding)
    if lengths is not None:
        tried = sorted({0, int(lengths.argmin()), int(lengths.argmax())})
        tokens = {place: _length(data, padding, place) for place in tried}
        if not lengths.min() and tokens[int(lengths.argmin())] is None:
            raise InputError(
                f"train_dataset or eval_dataset: sample {lengths.argmin()} has no tokens as its {padding.main}, and no "
                "batch can be made of it; leave it out"
            )
        if [*tokens.values()] != lengths[tried].tolist():
            lengths = None  # the collator cuts, or adds tokens
    if lengths is None:
        _check_draws_none(data, padding)
        lengths = _read_lengths(data, padding)
    if lengths is not None and lengths.min() < lengths.max():
        _check_collates(data, padding.main, int(lengths.argmin()), int(lengths.argmax()))
    return lengths


def length_of_stream(data: CollatedData, padding: Padding) -> int | None:
    """The tokens of the first samples of a stream; None if they have no sequence of tokens.

    Raises InputError if they differ in length, since nobody knows the longest.
    """
    tokens = (_length(data, padding, number) for number in data.order.of(0)[:_FIRST_OF_STREAM])
    lengths = {length for length in tokens if length is not None}
    if len(lengths) > 1:
        raise InputError(
            f"train_dataset: its stream begins with samples of {min(lengths)} to {max(lengths)} tokens, and how long "
            "others are is not known; give TrainingArguments.sequence_length, to which all are padded"
        )
    return next(iter(lengths), None)


def _length(data: CollatedData, padding: Padding, place: int, draw: int = 0) -> int | None:
    """The tokens of the sample at this place, as ``draw`` seeds it; None if it has no sequence of tokens."""
    try:
        return padding.length_of(data.collated([place], [0, draw]))
    except InputError:
        raise
    except Exception:  # a collator of the user's may need several samples
        return None


def _column_lengths(dataset: Any, padding: Padding) -> np.ndarray | None:
    """[samples] the most entries of a sample in a sequence, where that is known without making the samples."""
    names = [padding.main, *padding.decoder]
    rows: Iterator[Sequence[Any]]
    if isinstance(dataset, list | tuple) and all(isinstance(item, dict) and padding.main in item for item in dataset):
        rows = ([sample[name] for name in names if sample.get(name) is not None] for sample in dataset)
    elif padding.main in (getattr(dataset, "column_names", None) or ()) and hasattr(dataset, "with_format"):
        present = [name for name in names if name in dataset.column_names]
        plain = dataset.with_format("numpy", columns=present)
        columns = ([batch[name] for name in present] for batch in plain.iter(1000))
        rows = ([value for value in row if value is not None] for batch in columns for row in zip(*batch, strict=True))
    else:
        return None
    try:
        return np.array([max(map(len, row), default=0) for row in rows])
    except TypeError:  # a number has no length
        return None


def _check_draws_none(data: CollatedData, padding: Padding) -> None:
    """Raise InputError if the first few samples are of another length when they are drawn again."""
    for place in range(min(_DRAWN_AGAIN, len(data.dataset))):
        drawn = {_length(data, padding, place, draw) for draw in range(3)}
        if len(drawn) > 1:
            raise InputError(
                f"train_dataset or eval_dataset: how many tokens sample {place} has is drawn at random (found "
                f"{' and '.join(map(str, drawn))}); give TrainingArguments.sequence_length, to which all are padded"
            )


def _read_lengths(data: CollatedData, padding: Padding) -> np.ndarray | None:
    """[samples] their lengths, from each sample by itself; None if all are equally long as far as patience goes.

    Raises InputError where samples differ in length, and one cannot be read.
    """
    lengths, until, differ = np.zeros(len(data.dataset), dtype=np.int64), monotonic() + _PATIENCE_S, False
    for place in range(len(lengths)):
        length = _length(data, padding, place)
        if length is None and differ:
            raise InputError(
                f"train_dataset or eval_dataset: sample {place} cannot be read or collated by itself, as it must be to "
                "find how long samples are; mend or leave it out, or give TrainingArguments.sequence_length"
            )
        if length is None or (not differ and monotonic() > until):
            return None
        lengths[place] = length
        differ |= length != lengths[0]
    return lengths


def _check_collates(data: CollatedData, main: str, shortest: int, longest: int) -> None:
    try:
        rows = len(data.collated([shortest, longest], [0, 0])[main])
    except InputError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[:1]
        raise InputError(
            f"data_collator: it makes no batch of samples {shortest} and {longest}, which are not equally long "
            f"({type(error).__name__}: {''.join(reason)}); give one that pads, such as DataCollatorWithPadding"
        ) from None
    if rows != 2:
        raise InputError(
            f"data_collator: of samples {shortest} and {longest} it makes {main} with {rows} row: a pipeline needs one "
            "for each sample; pack the samples of the dataset instead, or give a collator that pads"
        )


def lengths_to_capture(of_micro_batches: np.ndarray, longest: int) -> tuple[int, ...]:
    """The few lengths, ``longest`` and shorter ones, with which micro-batches that are padded to one have few tokens.

    ``of_micro_batches`` has the tokens of their longest samples. Each length but the longest saves at least a tenth.
    """
    if of_micro_batches.min() == of_micro_batches.max():  # no sample is padded
        return tuple(sorted({int(of_micro_batches[0]), longest}))
    rounded = np.minimum(-(-of_micro_batches // _STEP) * _STEP, longest)
    lengths, counts = np.unique(np.append(rounded, longest), return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])  # micro-batches shorter than each length
    # Row by row: the fewest tokens of the micro-batches up to each length, with one captured length more, and its cut.
    tokens, cuts = lengths * before[1:], [np.zeros(len(lengths), dtype=np.int64)]
    best = int(tokens[-1])
    for _ in range(1, min(MOST, len(lengths))):
        through = np.concatenate([[0], tokens])[None, :-1] + lengths[:, None] * (before[1:, None] - before[None, :-1])
        through = np.where(np.tri(len(lengths), dtype=bool), through, np.iinfo(np.int64).max)
        cut = through.argmin(axis=1)
        tokens = through[np.arange(len(lengths)), cut]
        if tokens[-1] > (1 - _WORTH) * best:
            break
        best = int(tokens[-1])
        cuts.append(cut)
    chosen, end = [len(lengths) - 1], len(lengths) - 1
    for cut in reversed(cuts[1:]):
        end = int(cut[end]) - 1
        if end < 0:
            break
        chosen.append(end)
    return tuple(int(lengths[place]) for place in reversed(chosen))
