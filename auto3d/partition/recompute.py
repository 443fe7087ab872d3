"""Stage-aware recomputation: the fraction of each stage's subgraphs that is not recomputed.

Merak, section 6.2 of the version of 2022, 5.2 of TPDS 2023. A stage keeps the activations of its end. The backward of
the end comes first: it can begin as soon as the gradient arrives, and it has freed its activations by the time the
stage recomputes the dropped activations, unless the schedule recomputes them early (operation R).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from auto3d.capture.graph import Graph
from auto3d.plan import StagePlan

_ROUNDING = 1e-9


def kept_fractions(in_flight: Sequence[int], first: float) -> list[float]:
    """The kept fraction α of each stage, between 0 and 1, by the paper's recursion from ``first``, the α₁ of stage 1.

    A stage holds the activations of one micro-batch in any case while that micro-batch runs backward. So keeping a
    fraction α costs the activations of (n - 1)α micro-batches, where n, from ``in_flight``, is the number of
    micro-batches in flight on the stage. All stages use equally much memory for this: (n_i - 1)α_i = (n_1 - 1)α_1.

    The paper writes s - i for n_i - 1, which holds for 1F1B with enough micro-batches; α_{s-1} = α_{s-2}, since its own
    schedule holds one more micro-batch on the second to last stage; and α_s = 1. All of this follows from the n of the
    actual schedule, which also gives the right fractions for other schedules and for few micro-batches.
    """
    total = (in_flight[0] - 1) * first
    return [first, *(min(1.0, total / (n - 1)) if n > 1 else 1.0 for n in in_flight[1:])]


def first_fractions(in_flight: Sequence[int], subgraphs: Sequence[int]) -> list[float]:
    """All α₁, ascending, at which some stage keeps one more subgraph; ``subgraphs`` has the number in each stage."""
    fractions = {0.0, 1.0}
    for stage, (n, count) in enumerate(zip(in_flight, subgraphs, strict=True)):
        for kept in range(1, count + 1):
            if stage == 0:
                fractions.add(kept / count)
            elif n > 1 and in_flight[0] > 1:
                fractions.add(kept / count * (n - 1) / (in_flight[0] - 1))
    return sorted(fraction for fraction in fractions if fraction <= 1)


def subgraph_starts(graph: Graph, stage: StagePlan, bounds: Sequence[int]) -> list[int]:
    """Positions where the subgraphs of ``stage`` begin; ``bounds`` are the positions between the model's subgraphs."""
    starts: dict[int, int] = {}
    for position in sorted(position for span in stage.operations for position in range(*span)):
        if not graph.nodes[position].from_inputs:
            starts.setdefault(bisect_right(bounds, position), position)
    return list(starts.values())


def kept_count(subgraphs: int, fraction: float) -> int:
    """The number of subgraphs that are this fraction of ``subgraphs``, rounded down."""
    return int(fraction * subgraphs + _ROUNDING)


def keep_last(stage: StagePlan, starts: Sequence[int], fraction: float) -> StagePlan:
    """``stage`` with this fraction of its subgraphs kept, counted from its end; the number is rounded down."""
    count = kept_count(len(starts), fraction)
    if count == len(starts):
        return replace(stage, kept=stage.operations)
    start = starts[-count] if count else stage.operations[-1][1]
    kept = tuple((max(first, start), last) for first, last in stage.operations if last > start)
    return replace(stage, kept=kept)
