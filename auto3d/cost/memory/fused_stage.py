"""The bytes of a stage under another system, whose fused kernels save other tensors than the operations of the Graph.

``auto3d.cost.system_bytes`` says what each operation saves and needs; values that no kernel saves do not count.
Positions count the operations of the whole Graph.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from auto3d.cost.memory.segment import Peak
from auto3d.cost.memory.stage import StageMemory, mean_of_slices
from auto3d.cost.memory.stage_bytes import StageRun
from auto3d.cost.memory.stage_tensors import StageTensor, fused_stage_tensors
from auto3d.cost.model_work import ModelWork
from auto3d.cost.parameters import local_spans
from auto3d.cost.systems import System
from auto3d.cost.tables import WorkTables, without
from auto3d.cost.tensors import Span
from auto3d.share import Share


class FusedStages:
    """Stages under ``system``; ``blockwise`` is as in ``OwnStages``."""

    in_whole = True

    def __init__(self, work: ModelWork, system: System, *, blockwise: bool) -> None:
        self._work, self._blockwise, self.gradient_copies = work, blockwise, system.gradient_copies

    def of(self, run: StageRun) -> StageMemory:
        tables, operations, dropped, divisor = self._parts(run)
        slices = [fused_stage_memory(table, operations, dropped, blockwise=self._blockwise) for table in tables]
        return mean_of_slices([memory.divided(divisor) for memory in slices])

    def tensors(self, run: StageRun) -> Iterator[StageTensor]:
        tables, operations, dropped, divisor = self._parts(run)
        for table in tables:
            tensors = fused_stage_tensors(table, operations, dropped, blockwise=self._blockwise)
            yield from (replace(tensor, bytes=tensor.bytes / divisor) for tensor in tensors)

    def _parts(self, run: StageRun) -> tuple[list[WorkTables], tuple[Span, ...], tuple[Span, ...], int]:
        """The tables of each share; the operations of the stage, and those that run again; the divisor of bytes."""
        samples, divisor = self._work.slice_of(run.samples, run.stage.replicas)
        dropped = self._work.dropped(samples, run.stage, recompute=run.recompute)
        return [self._work.tables(samples, share) for share in run.shares], run.stage.operations, dropped, divisor

    def private(self, run: StageRun, share: Share) -> frozenset[int]:
        return frozenset()  # all gradients are in buffers

    def saved_from(self, run: StageRun, kept_from: np.ndarray) -> None:
        return None


def fused_stage_memory(
    tables: WorkTables, operations: Sequence[Span], dropped: Sequence[Span], *, blockwise: bool
) -> StageMemory:
    """The memory of a stage that runs ``operations`` and recomputes the operations in ``dropped``."""
    work = tables.work
    received, sent = float(work.crossing[operations[0][0]]), float(work.crossing[operations[-1][1]])
    again = tables.saved(dropped) if dropped else 0.0
    kept = tables.saved(operations) - again
    if dropped and blockwise:
        again /= max(1, tables.blocks_of(operations))
        kept += max(0.0, tables.block_inputs(dropped) - received)
    kept += _keys_and_values(tables, dropped)
    working = _working(tables, operations)
    backward = Peak(size=max(0.0, again + working.size), position=working.position)
    none = Peak(size=0.0, position=operations[0][0])
    return StageMemory(
        in_flight=kept + received,
        inputs=received,
        recomputed=again,
        deferred=tables.deferred(operations),
        slice_gradient=_keys_and_values(tables, operations),
        forward=none,
        recompute=none,
        backward=backward,
        first_backward=backward,
        after_recompute=Peak(size=max(0.0, working.size), position=working.position),
        weight_half=none,
        private=0.0,
        received=received,
        received_gradient=received,
        sent=sent,
        sent_gradient=sent,
        sent_beside=sent if without(operations, dropped) != tuple(operations) else 0.0,
    )


def _keys_and_values(tables: WorkTables, operations: Sequence[Span]) -> float:
    """Bytes of the keys and values of a slice of the sequence that later slices attend to, or of their gradients."""
    tensors = tables.work.tensors
    return sum(float(tensors.slice_gradient[first:last].sum()) for first, last in local_spans(tensors, operations))


def _working(tables: WorkTables, operations: Sequence[Span]) -> Peak:
    """Most bytes of temporaries of one of ``operations``, less what its micro-batch no longer saves by then.

    The backward of an operation finds only what it and earlier operations saved.
    """
    work = tables.work
    remaining, most = tables.saved(operations), Peak(size=0.0, position=operations[0][0])
    for first, last in operations:
        so_far = np.cumsum(work.saved[first:last])
        sizes = work.working[first:last] + so_far - remaining
        place = int(sizes.argmax())
        if sizes[place] > most.size:
            most = Peak(size=float(sizes[place]), position=first + place)
        remaining -= float(so_far[-1])
    return most
