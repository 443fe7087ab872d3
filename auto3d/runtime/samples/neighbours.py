"""Which micro-batches of another pipeline a rank reads too, so that it can compare them.

Pipelines, and replicas of a stage, read different samples. So a sample that differs between their machines would be
compared with nobody, if no rank read what its neighbour reads. It reads all of it where samples are places in
files, and else as much as takes BUDGET_US in an iteration, by what all ranks have measured at the start.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from statistics import median
from time import perf_counter

import torch

from auto3d.data import TrainingData
from auto3d.runtime.layout import RankLayout
from auto3d.runtime.messages.gathered import of_all_ranks

BUDGET_US = 1000  # µs of an iteration
LEAST_EVERY = 16  # iterations, in which a micro-batch is compared whatever it costs
MOST_US = LEAST_EVERY * BUDGET_US
_MEASURED = 3  # micro-batches


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Whose micro-batches a rank compares: it reads them after its own micro-batches of an iteration.

    Each reader has one neighbour, and is the neighbour of one reader, in another pipeline if there are several.
    """

    stage: int  # this stage of this rank's pipeline reads
    first: int  # the neighbour's first micro-batch in the global batch
    replica: int  # its number among the replicas of the stage

    @classmethod
    def of(cls, layout: RankLayout, stage: int) -> "Neighbour | None":
        """The neighbour of this rank, which runs a replica of ``stage``; None if all read the same."""
        slots = layout.plan.dp * layout.replicas
        if slots == 1:
            return None
        replica, pipeline = divmod((layout.replica * layout.plan.dp + layout.pipeline + 1) % slots, layout.plan.dp)
        return cls(stage, pipeline * layout.micro_batches // layout.schedule.slices, replica)


@lru_cache(16)  # each micro-batch of an iteration asks
def compared(iteration: int, *, micro_batches: int, cost_us: int, is_due: bool) -> Collection[int]:
    """The micro-batches, by their places in each pipeline, that neighbours compare in ``iteration``: all in turn.

    A comparison costs ``cost_us``; 0: nothing that counts. Where comparisons are due, a micro-batch is compared anyway.
    """
    if not cost_us:
        return range(micro_batches)
    before, after = (BUDGET_US * iterations // cost_us for iterations in (iteration, iteration + 1))
    count = min(micro_batches, max(after - before, int(is_due)))
    return frozenset(turn % micro_batches for turn in range(before, before + count))


def measured_us(read: Callable[[int], object] | None, *, times: int) -> int:
    """What it costs to compare a micro-batch, on which all ranks agree: µs, from 1 to MOST_US.

    ``read`` reads one of the neighbour's micro-batches, by a number from 0 on; None: this rank compares nothing. An
    iteration reads ``times`` as much. A rank takes its least time, since others may compute on its core meanwhile.
    """
    seconds: list[float] = []
    for number in range(1 + _MEASURED if read is not None else 0):
        begun = perf_counter()
        read(number)  # type: ignore[misc]
        seconds.append(perf_counter() - begun)
        if number and 1e6 * seconds[-1] > MOST_US:
            break
    least = min(seconds[1:], default=0.0)  # the first reading may open files
    of_ranks = of_all_ranks([least], torch.float64, what="what all ranks need to read a micro-batch that is compared")
    readers = [rank_s for rank_s in of_ranks[:, 0].tolist() if rank_s]
    return max(1, min(MOST_US, ceil(1e6 * times * median(readers)))) if readers else MOST_US


def agrees(data: TrainingData, layout: RankLayout) -> bool:
    """Whether ranks must measure what comparisons cost: all say the same."""
    return not data.is_by_position and layout.plan.dp * max(stage.replicas for stage in layout.plan.stages) > 1
