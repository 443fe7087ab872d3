"""DataLoaders that a script makes itself, of which a pipeline takes the dataset, the order and the collator."""

from collections.abc import Sequence
from typing import Any

from accelerate.data_loader import DataLoaderShard
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from auto3d.errors import InputError
from auto3d.trainer.generators import PROCESS
from auto3d.trainer.stream import is_stream


def check_loader(loader: Any, method: str, size: int, argument: str) -> None:
    """Raise InputError unless a pipeline can read what ``loader``, which the Trainer's ``method`` returned, would.

    ``size`` is the number of samples of its batches that ``argument`` says.
    """
    if reason := _why_not(loader, size, argument):
        raise InputError(
            f"Trainer.{method}: refused: it returned {reason}; return a torch DataLoader, whose dataset, sampler, "
            f"collate_fn, drop_last and workers are taken, with batch_size={size}"
        )


def _why_not(loader: Any, size: int, argument: str) -> str:
    if not isinstance(loader, DataLoader) or type(loader).__iter__ not in (
        DataLoader.__iter__,
        DataLoaderShard.__iter__,
    ):
        return f"a {type(loader).__name__}, whose batches each rank would have to read in full, to take its own"
    if is_stream(loader.dataset):
        return "a DataLoader of a stream: give the Trainer the stream as its dataset"
    if type(loader.batch_sampler) is not BatchSampler:
        kind = type(loader.batch_sampler).__name__ if loader.batch_sampler is not None else "no batches"
        return f"a DataLoader with {kind}, whose batches may differ in size: give the order of samples as its sampler"
    if isinstance(loader.batch_sampler.sampler, DistributedSampler):
        return "a DataLoader with a DistributedSampler, and the plan divides the samples: give the order of all of them"
    if not hasattr(loader.batch_sampler.sampler, "__len__"):
        return "a DataLoader whose sampler has no length: give it __len__"
    if not len(loader):
        return "a DataLoader without batches: give it samples"
    if loader.batch_sampler.batch_size != size:  # of a loader that accelerate has prepared, batch_size is None
        return f"a DataLoader with batch_size={loader.batch_sampler.batch_size}, and {argument} says {size}"
    return ""


def positions_of(sampler: Any) -> Sequence[int] | None:
    """The order in which an evaluation takes samples by ``sampler``; None: that of the dataset.

    Raises InputError for a sampler of the script's that draws an order, which would be another one in each evaluation.
    """
    if isinstance(sampler, SequentialSampler):
        return None
    if isinstance(sampler, LengthGroupedSampler):  # transformers' own
        return list(sampler)
    before = PROCESS.states()
    with PROCESS.at(before):
        positions = list(sampler)
        is_drawn = PROCESS.states().to_json() != before.to_json() or positions != list(sampler)
    if is_drawn:
        raise InputError(
            f"Trainer.get_eval_dataloader: refused: its sampler, a {type(sampler).__name__}, draws an order; give "
            "evaluations a fixed one, such as shuffle=False of a torch.utils.data.Subset"
        )
    return positions
