"""Stage-aware recomputation: the share of each stage's subgraphs that is not recomputed.

Merak, section 6.2 of the version of 2022, 5.2 of TPDS 2023. The kept share is the end of a stage. Its backward comes
first, so it can begin as soon as the gradient is there, and its activations are gone when what the stage dropped is
made again, unless the schedule has that done early (R).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from auto3d.capture.graph import Graph
from auto3d.plan import StagePlan

_ROUNDING = 1e-9


def kept_fractions(in_flight: Sequence[int], first: float) -> list[float]:
    """The recursion: the share α of each stage, from ``first``, α₁ of the first stage, between 0 and 1.

    A stage holds the activations of one micro-batch anyway, while that runs backward, so keeping a share α costs it
    (n - 1)α of them, where ``in_flight`` has its n. All stages fill their memory equally: (n_i - 1)α_i = (n_1 - 1)α_1.

    The paper writes s - i for n_i - 1, which is 1F1B's with enough micro-batches, α_{s-1} = α_{s-2}, since its own
    schedule holds one micro-batch more on the last stage but one, and α_s = 1. All of that follows from the n of the
    schedule that is run; with these, other schedules and few micro-batches come out right too.
    """
    total = (in_flight[0] - 1) * first
    return [first, *(min(1.0, total / (n - 1)) if n > 1 else 1.0 for n in in_flight[1:])]


def first_fractions(in_flight: Sequence[int], subgraphs: Sequence[int]) -> list[float]:
    """All α₁, ascending, at which the recursion keeps a subgraph more of one of stages of so many ``subgraphs``."""
    found = {0.0, 1.0}
    for stage, (n, count) in enumerate(zip(in_flight, subgraphs, strict=True)):
        for kept in range(1, count + 1):
            if stage == 0:
                found.add(kept / count)
            elif n > 1 and in_flight[0] > 1:
                found.add(kept / count * (n - 1) / (in_flight[0] - 1))
    return sorted(fraction for fraction in found if fraction <= 1)


def subgraph_starts(graph: Graph, stage: StagePlan, bounds: Sequence[int]) -> list[int]:
    """Positions at which the subgraphs between ``bounds``, as far as they lie in ``stage``, begin."""
    starts: dict[int, int] = {}
    for position in sorted(position for span in stage.operations for position in range(*span)):
        if not graph.nodes[position].from_inputs:
            starts.setdefault(bisect_right(bounds, position), position)
    return list(starts.values())


def keep_last(stage: StagePlan, starts: Sequence[int], fraction: float) -> StagePlan:
    """``stage`` with so large a share of its subgraphs kept, rounded down."""
    count = int(fraction * len(starts) + _ROUNDING)
    if count == len(starts):
        return replace(stage, kept=stage.operations)
    start = starts[-count] if count else stage.operations[-1][1]
    kept = tuple((max(first, start), last) for first, last in stage.operations if last > start)
    return replace(stage, kept=kept)
