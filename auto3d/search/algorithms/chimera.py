"""Chimera's planner: the largest micro-batch, then width and depth by a formula (Li and Hoefler 2021, section 3.4)."""

from dataclasses import replace
from math import inf

from auto3d.schedule import parse_schedule
from auto3d.search.axes import EQUAL, Candidate
from auto3d.search.recompute import NONE
from auto3d.search.search import Search


def chimera(search: Search, seed: int) -> None:
    """Estimate the plan of the width W = dp and depth D = pp that are the fastest by the paper's equation 1.

    For each (W, D), the micro-batch size is the largest that fits into memory and leaves at least D micro-batches,
    which keep all stages active. If no size leaves so many, it is the smallest (section 3.1, N < D). Only where no size
    fits, activations are recomputed (section 4.2.3). Stages have equally many blocks, and gradient syncs are eager
    where bubbles hide them (section 3.2). The axis of schedules may name variants, such as chimera:scale=doubling, of
    which the paper leaves the choice to experiments (section 3.5). ``seed`` has no effect.
    """
    domain, equation = search.domain, search.maker.model.by("chimera")
    variants = [name for name in domain.choices["schedule"] if parse_schedule(name)[0] == "chimera"] or ["chimera"]
    recomputes = sorted(domain.choices["recompute"], key=lambda recompute: recompute != NONE)
    sizes: dict[tuple[int, int], list[Candidate]] = {}
    for degrees in domain.degrees:
        if degrees.tp == 1 and degrees.replicas == EQUAL and degrees.pp % 2 == 0:
            sizes.setdefault((degrees.dp, degrees.pp), []).append(
                replace(degrees, partition="blocks", sync="eager-opt")
            )
    best: tuple[float, Candidate] | None = None
    for of_degrees in sizes.values():
        for variant in variants:
            greedy = (
                replace(candidate, schedule=variant, recompute=recompute)
                for recompute in recomputes
                for candidate in _largest_first(of_degrees, domain.workload.global_batch)
            )
            fitting = next((candidate for candidate in greedy if search.bound(candidate) < inf), None)
            if fitting is not None:
                seconds = equation.seconds(search.plan(fitting))
                if best is None or seconds < best[0]:
                    best = seconds, fitting
    if best is not None:
        search.seconds(best[1])


def _largest_first(candidates: list[Candidate], global_batch: int) -> list[Candidate]:
    """Candidates that the planner may take, the largest micro-batch size first; ``candidates`` differ in it."""
    active = [
        candidate
        for candidate in candidates
        if global_batch // (candidate.dp * candidate.micro_batch_size) >= candidate.pp
    ]
    active = active or [min(candidates, key=lambda candidate: candidate.micro_batch_size)]
    return sorted(active, key=lambda candidate: -candidate.micro_batch_size)
