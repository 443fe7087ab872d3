"""The tensors that a stage holds for its micro-batches: the terms of a StageMemory, each with its name."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from auto3d.cost.memory.segment import RunTensors, segment_of
from auto3d.cost.memory.segments import Segments
from auto3d.cost.memory.stage import runs_of, stage_runs
from auto3d.cost.parameters import local_spans
from auto3d.cost.tables import WorkTables, without
from auto3d.cost.tensors import Span, Tensors


@dataclass(frozen=True, kw_only=True)
class StageTensor:
    """A tensor that a stage holds once for each micro-batch of a count."""

    count: str  # a field of Counts
    kind: str  # an entry of DeviceMemory
    name: str
    bytes: float
    is_received: bool = False  # whether a message from an earlier stage brings it


def stage_tensors(
    segments: Segments, operations: Sequence[Span], dropped: Sequence[Span], *, split: bool, block: Span | None
) -> Iterator[StageTensor]:
    """The tensors whose bytes ``stage_memory`` with these arguments counts for a micro-batch."""
    tensors, stage = segments.tensors, stage_runs(segments, operations, dropped, split=split)

    def held_by(spans: Sequence[Span]) -> RunTensors:
        return segment_of(tensors, spans, shared=frozenset(), split=split)[1]

    for memory in sorted(stage.inputs):
        yield StageTensor(
            count="in_flight",
            kind="inputs",
            name=tensors.names[memory],
            bytes=float(tensors.size[memory]),
            is_received=memory in stage.received,
        )
    for is_kept, spans in runs_of(operations, dropped):
        if is_kept:
            yield from _saved(tensors, held_by(spans), "in_flight")
            continue
        run = held_by(spans)
        for memory in sorted(run.earlier - stage.inputs):
            yield _activation("in_flight", tensors.names[memory], tensors.size[memory])
        if block is None:
            yield from _saved(tensors, run, "recomputed", beside=run.earlier - stage.inputs)
    if block is not None and dropped:
        run = held_by((block,))
        yield from _saved(tensors, run, "recomputed", beside=run.earlier - stage.inputs)
    whole = held_by(operations)
    for memory in whole.put_off.tolist():
        yield _activation("deferred", tensors.names[memory], tensors.size[memory])
    yield from _of_later_slices(tensors, whole.positions.tolist())
    if split:
        for position in whole.positions.tolist():
            name = f"gradient of the result of {tensors.operations[position]}"
            yield _activation("deferred", name, tensors.deferred_gradient[position])


def fused_stage_tensors(
    tables: WorkTables, operations: Sequence[Span], dropped: Sequence[Span], *, blockwise: bool
) -> Iterator[StageTensor]:
    """The tensors whose bytes ``fused_stage_memory`` with these arguments counts for a micro-batch."""
    work = tables.work
    received = float(work.crossing[operations[0][0]])
    yield StageTensor(count="in_flight", kind="inputs", name="received values", bytes=received, is_received=True)
    for position in _positions(without(operations, dropped)):
        yield _activation("in_flight", f"saved by {_operation(tables, position)}", work.saved[position])
    if dropped and blockwise:
        inputs = max(0.0, tables.block_inputs(dropped) - received)
        yield _activation("in_flight", "inputs of recomputed blocks", inputs)
        block_bytes = tables.saved(dropped) / max(1, tables.blocks_of(operations))
        yield _activation("recomputed", "activations of one recomputed block", block_bytes)
    elif dropped:
        for position in _positions(dropped):
            yield _activation("recomputed", f"saved by {_operation(tables, position)}", work.saved[position])
    for span in local_spans(work.tensors, dropped):
        for position in range(*span):
            name = f"operand of {work.tensors.operations[position]}"
            yield _activation("in_flight", name, work.tensors.slice_gradient[position])
    for position in _positions(operations):
        name = f"operands and gradients of {_operation(tables, position)}"
        yield _activation("deferred", name, work.deferred[position])
    for span in local_spans(work.tensors, operations):
        yield from _of_later_slices(work.tensors, range(*span))


def _of_later_slices(tensors: Tensors, positions: Iterable[int]) -> Iterator[StageTensor]:
    for position in positions:
        name = f"gradient of the operand of {tensors.operations[position]}"
        yield _activation("slice_gradients", name, tensors.slice_gradient[position])


def _saved(tensors: Tensors, run: RunTensors, count: str, *, beside: Collection[int] = ()) -> Iterator[StageTensor]:
    """What stays of ``run``, but for the memories in ``beside``."""
    for memory in run.held.tolist():
        if memory in beside:
            continue
        yield _activation(count, tensors.names[memory], tensors.size[memory])
    for position, size in zip(run.positions.tolist(), run.extra.tolist(), strict=True):
        yield _activation(count, f"saved by {tensors.operations[position]}", size)
    for memory, size in zip(*run.laid_out, strict=True):
        yield _activation(count, f"{tensors.names[memory]}, laid out anew", size)


def _activation(count: str, name: str, size: float) -> StageTensor:
    return StageTensor(count=count, kind="activations", name=name, bytes=float(size))


def _positions(spans: Sequence[Span]) -> Iterator[int]:
    for first, last in spans:
        yield from range(first, last)


def _operation(tables: WorkTables, position: int) -> str:
    """Module and operator at ``position`` of the whole Graph."""
    tensors = tables.work.tensors
    here = position if tensors.begins is None else min(int(tensors.begins[position]), tensors.count - 1)
    return tensors.operations[here]
