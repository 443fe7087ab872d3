"""The bytes of one stage: of its micro-batches in flight, and of the operations that run on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from auto3d.cost.memory.segment import Peak, RunBytes
from auto3d.cost.memory.segments import Segments
from auto3d.cost.tensors import Span, Tensors


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes that one replica of a stage holds for one micro-batch, and the peaks of operations beyond what it holds.

    The peaks of backwards come before the micro-batch is freed. Peaks of a recomputing stage include the recomputation.
    """

    in_flight: float  # inputs and activations, from the forward until the backward
    inputs: float  # the part of ``in_flight`` that the stage takes from others
    recomputed: float  # activations that a recomputation adds
    deferred: float  # bytes that a split backward keeps for its weight half
    slice_gradient: float  # gradients of the keys and values of a slice of the sequence, which later slices make
    forward: Peak
    recompute: Peak
    backward: Peak
    first_backward: Peak  # first of an iteration: it makes the gradients of private parameters, and counts them
    after_recompute: Peak  # backward after a recomputation that is an operation of its own
    weight_half: Peak
    private: float  # gradients of parameters that no other stage has, which the first backward makes
    received: float  # one message from earlier stages
    received_gradient: float  # gradient of such a message
    sent: float
    sent_gradient: float
    sent_beside: float  # the part of ``sent`` that is not part of ``in_flight``

    def divided(self, by: int) -> "StageMemory":
        """The bytes at an equal part of the samples; the bytes of weights are divided, too."""
        if by == 1:
            return self
        changed: dict[str, Any] = {
            name: replace(value, size=value.size / by) if isinstance(value, Peak) else value / by
            for name, value in vars(self).items()
        }
        return replace(self, **changed | {"private": self.private})

    def moved(self, position: Callable[[int], int]) -> "StageMemory":
        """The same with ``position`` of each peak's position."""
        peaks = {name: value for name, value in vars(self).items() if isinstance(value, Peak)}
        moved: dict[str, Any] = {name: replace(peak, position=position(peak.position)) for name, peak in peaks.items()}
        return replace(self, **moved)


def mean_of_slices(slices: Sequence[StageMemory]) -> StageMemory:
    """The memory of a stage whose parts of a micro-batch are ``slices`` of the sequence.

    Any of them may be in flight, so the bytes that it holds are their mean. Each peak is the largest.
    """
    if len(slices) == 1:
        return slices[0]
    merged: dict[str, Any] = {}
    for field in fields(StageMemory):
        values = [getattr(memory, field.name) for memory in slices]
        is_peak = isinstance(values[0], Peak)
        merged[field.name] = max(values, key=lambda peak: peak.size) if is_peak else sum(values) / len(values)
    return StageMemory(**merged)


@dataclass(frozen=True, kw_only=True)
class StageRuns:
    """A stage as runs of neighbouring operations that are all kept, or all recomputed."""

    runs: list[tuple[bool, RunBytes]]  # whether the run is kept, in the order of the forward
    whole: RunBytes  # all operations as one run
    inputs: frozenset[int]  # memories that stay for the micro-batch and that no kept run makes
    received: frozenset[int]  # memories of messages from earlier stages


def stage_runs(segments: Segments, operations: Sequence[Span], dropped: Sequence[Span], *, split: bool) -> StageRuns:
    """The runs of a stage with ``operations`` that recomputes the operations in ``dropped``; ``split``: see
    stage_memory."""
    tensors, shared = segments.tensors, segments.used_outside(operations)
    runs = [
        (is_kept, segments.of(spans, shared=shared | segments.used_outside(spans), split=split))
        for is_kept, spans in runs_of(operations, dropped)
    ]
    whole = runs[0][1] if len(runs) == 1 else segments.of(operations, shared=shared, split=split)
    kept_gives = frozenset[int]().union(*(run.given for is_kept, run in runs if is_kept))
    taken = frozenset[int]().union(*(run.taken for _, run in runs))
    received = frozenset(
        number for number in whole.taken if tensors.maker[number] >= 0 and not tensors.repeated[number]
    )
    return StageRuns(runs=runs, whole=whole, inputs=taken - kept_gives, received=received)


def stage_memory(
    segments: Segments, operations: Sequence[Span], dropped: Sequence[Span], *, split: bool, block: Span | None = None
) -> StageMemory:
    """The memory of a stage that runs ``operations`` and recomputes the operations in ``dropped``.

    With ``block``, each of the dropped blocks is recomputed by itself: ``block`` is the last of them. With ``split``,
    backwards have a weight half.
    """
    of_stage = stage_runs(segments, operations, dropped, split=split)
    runs, whole, received = of_stage.runs, of_stage.whole, of_stage.received
    tensors = segments.tensors
    size = tensors.size

    def total(memories: frozenset[int]) -> float:
        return float(size[sorted(memories)].sum())

    inputs = total(of_stage.inputs)
    inner = None
    if block is not None and dropped:
        inner = segments.of((block,), shared=segments.used_outside(operations), split=split)

    def earlier(run: RunBytes) -> float:
        """Bytes that the stage keeps of the recomputed run for later slices, beside inputs."""
        return total(run.earlier - of_stage.inputs)

    held = inputs + sum(run.saved if is_kept else earlier(run) for is_kept, run in runs)
    again = [run for is_kept, run in runs if not is_kept] if inner is None else [inner]
    recomputed = sum(run.saved - earlier(run) for run in again)

    forward = _Highest()
    before = inputs
    for is_kept, run in runs:
        peak = run.forward if is_kept else run.dropping
        forward.add(before, peak)
        before += run.saved if is_kept else earlier(run)
    given_gradients = _differentiable(tensors, whole.given)
    backward, first, late = _Highest(), _Highest(), _Highest()
    before, all_saved, made = held, held + recomputed, 0.0
    for is_kept, run in reversed(runs):
        repeated = run if is_kept or inner is None else inner
        if is_kept:
            before -= run.saved
        else:
            backward.add(before + given_gradients, repeated.again)
            first.add(before + given_gradients + made, repeated.again)
            before -= earlier(repeated)
        all_saved -= repeated.saved
        backward.add(before, repeated.backward)
        first.add(before + made, repeated.first_backward)
        late.add(all_saved, repeated.backward)
        made += run.private
    recompute = _Highest()
    before = held
    for is_kept, run in runs:
        if not is_kept:
            recompute.add(before, run.again)
            before += run.saved - earlier(run)
    last_kept = runs[-1][0]
    return StageMemory(
        in_flight=held,
        inputs=inputs,
        recomputed=recomputed,
        deferred=whole.deferred,
        slice_gradient=whole.slice_gradient,
        forward=forward.beyond(held),
        recompute=recompute.beyond(held + recomputed),
        backward=backward.beyond(held),
        first_backward=first.beyond(held),
        after_recompute=late.beyond(held + recomputed),
        weight_half=whole.weight_half,
        private=made,
        received=total(received),
        received_gradient=_differentiable(tensors, received),
        sent=total(whole.given),
        sent_gradient=given_gradients,
        sent_beside=whole.sent_copies if last_kept else total(whole.given),
    )


class _Highest:
    """The highest of several peaks, each on top of other bytes."""

    def __init__(self) -> None:
        self._peak = Peak(size=0.0, position=0)

    def add(self, before: float, peak: Peak) -> None:
        if before + peak.size > self._peak.size:
            self._peak = Peak(size=before + peak.size, position=peak.position)

    def beyond(self, held: float) -> Peak:
        return replace(self._peak, size=max(0.0, self._peak.size - held))


def _differentiable(tensors: Tensors, memories: frozenset[int]) -> float:
    """Bytes of the gradients of ``memories``, as far as they have gradients."""
    return float(sum(tensors.size[number] for number in memories if number in tensors.with_gradient))


def runs_of(operations: Sequence[Span], dropped: Sequence[Span]) -> list[tuple[bool, list[Span]]]:
    """The neighbouring operations that are all kept or all dropped, in order: (whether they are kept, their spans)."""
    bounds = sorted({bound for span in (*operations, *dropped) for bound in span})
    runs: list[tuple[bool, list[Span]]] = []
    for first, last in pairwise(bounds):
        if not any(start <= first < stop for start, stop in operations):
            continue
        is_kept = not any(start <= first < stop for start, stop in dropped)
        if runs and runs[-1][0] == is_kept:
            if runs[-1][1][-1][1] == first:
                runs[-1][1][-1] = runs[-1][1][-1][0], last
            else:
                runs[-1][1].append((first, last))
        else:
            runs.append((is_kept, [(first, last)]))
    return runs
