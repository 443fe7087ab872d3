"""What a rank holds of its stages: the questions of ``PlanMemory`` to a training system, and this runtime's answers."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from auto3d.cost.memory.segments import Segments, earlier
from auto3d.cost.memory.stage import StageMemory, mean_of_slices, runs_of, stage_memory
from auto3d.cost.memory.stage_tensors import StageTensor, stage_tensors
from auto3d.cost.model_work import ModelWork
from auto3d.cost.parameters import local_spans, parameters_in
from auto3d.cost.tensors import Span
from auto3d.plan import StagePlan
from auto3d.share import Share

KEPT = 2**13  # results of each kind that are kept: the plans of a search have many devices and stages in common


class StageRun(NamedTuple):
    """A stage, and how the ranks of one pipeline run it."""

    stage: StagePlan
    samples: int  # samples that all replicas of the stage run at once
    shares: tuple[Share, ...]  # shares of the work on a micro-batch; several for slices of a sequence
    recompute: bool
    split: bool  # whether backwards have a weight half


class StageBytes(Protocol):
    """What a training system holds of a stage."""

    gradient_copies: float  # bytes per parameter of gradients beside the accumulated gradients
    in_whole: bool  # whether positions of peaks always count the operations of the whole Graph, as for slices

    def of(self, run: StageRun) -> StageMemory:
        """The memory of a stage for a micro-batch or, if it has several shares, for the mean of them."""

    def tensors(self, run: StageRun) -> Iterator[StageTensor]:
        """The tensors whose bytes ``of`` counts, of each share."""

    def private(self, run: StageRun, share: Share) -> frozenset[int]:
        """The trained parameters, numbers in ``share``, whose gradients the first backward of the stage makes."""

    def saved_from(self, run: StageRun, kept_from: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """[variants]: at least the bytes of a micro-batch that a stage keeps, and that it makes again, if it keeps its
        operations from these positions on. None if there is no such bound."""


class _Parts(NamedTuple):
    """What a share of the work runs of a stage, in positions of the share's operations."""

    segments: Segments
    operations: tuple[Span, ...]
    dropped: tuple[Span, ...]  # operations that run again
    block: Span | None  # the last of the recomputed blocks, if each is recomputed by itself
    block_inputs: float  # bytes of the inputs of the recomputed blocks
    divisor: int  # all bytes are divided by it, since they are bytes of more samples


class OwnStages:
    """Stages under this project's runtime: what autograd keeps of the operations of the Graph, one by one.

    ``blockwise``: a recomputing stage keeps the input of each block, and recomputes one block at a time.
    """

    gradient_copies = 0.0
    in_whole = False

    def __init__(self, work: ModelWork, *, blockwise: bool) -> None:
        self._work, self._blockwise = work, blockwise
        self._segments = cache(lambda samples, share: Segments(work.tables(samples, share).work.tensors))
        self._memory = lru_cache(KEPT)(stage_memory)

    def of(self, run: StageRun) -> StageMemory:
        slices = [self._of_share(run, share) for share in run.shares]
        if len(slices) > 1:
            every = (self._work.tables(run.samples, share).work.tensors for share in run.shares)
            slices = [memory.moved(tensors.whole_position) for memory, tensors in zip(slices, every, strict=True)]
        return mean_of_slices(slices)

    def _of_share(self, run: StageRun, share: Share) -> StageMemory:
        here = self._parts(run, share)
        repeat = here.segments.repeat_of(here.operations)
        by = 0 if repeat is None else repeat[0].period * repeat[1]
        block = None if here.block is None else (here.block[0] - by, here.block[1] - by)
        spans = earlier(here.operations, by), earlier(here.dropped, by)
        memory = self._memory(here.segments, *spans, split=run.split, block=block)
        if by:
            memory = memory.moved(lambda position: position + by)
        if block is not None:
            inputs = max(0.0, here.block_inputs - memory.received)
            memory = replace(memory, in_flight=memory.in_flight + inputs, inputs=memory.inputs + inputs)
        return memory.divided(here.divisor)

    def tensors(self, run: StageRun) -> Iterator[StageTensor]:
        for here in (self._parts(run, share) for share in run.shares):
            tensors = stage_tensors(here.segments, here.operations, here.dropped, split=run.split, block=here.block)
            yield from (replace(tensor, bytes=tensor.bytes / here.divisor) for tensor in tensors)
            if here.block is not None:
                size = max(0.0, here.block_inputs - self.of(run).received * here.divisor) / here.divisor
                yield StageTensor(count="in_flight", kind="inputs", name="inputs of recomputed blocks", bytes=size)

    def private(self, run: StageRun, share: Share) -> frozenset[int]:
        here, parameters = self._parts(run, share), set[int]()
        for _, spans in runs_of(here.operations, here.dropped):
            parameters |= set(parameters_in(here.segments.tensors, spans)) - here.segments.used_outside(spans)
        return frozenset(parameters)

    def saved_from(self, run: StageRun, kept_from: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        if self._blockwise or len(run.stage.operations) > 1:
            return None
        saved, every = np.zeros(len(kept_from)), 0.0
        for here in (self._parts(run, share) for share in run.shares):
            (span,), begins = here.operations, here.segments.tensors.begins
            places = kept_from if begins is None else begins[kept_from]
            bytes_from = here.segments.saved_from(span) / here.divisor / len(run.shares)
            saved += bytes_from[places - span[0]]
            every += float(bytes_from[0])
        return saved, every - saved

    def _parts(self, run: StageRun, share: Share) -> _Parts:
        samples, divisor = self._work.slice_of(run.samples, run.stage.replicas)
        tables = self._work.tables(samples, share)
        tensors = tables.work.tensors
        dropped = self._work.dropped(samples, run.stage, recompute=run.recompute)
        block = tables.last_block(dropped) if dropped and self._blockwise else None
        return _Parts(
            segments=self._segments(samples, share),
            operations=local_spans(tensors, run.stage.operations),
            dropped=local_spans(tensors, dropped),
            block=None if block is None else local_spans(tensors, (block,))[0],
            block_inputs=0.0 if block is None else tables.block_inputs(dropped),
            divisor=divisor,
        )
