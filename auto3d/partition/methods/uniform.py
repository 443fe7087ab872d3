"""Uniform partition: contiguous stages of nearly equal FLOPs, cut where little has to be sent."""

from functools import lru_cache

from auto3d.capture.graph import Graph
from auto3d.partition.contiguous import cheapest_cuts, smallest_maximum
from auto3d.partition.outline import Outline, outline_of
from auto3d.partition.problem import StageProblem
from auto3d.partition.stage import check_enough
from auto3d.plan import StagePlan, stages_between

TOLERANCE = 0.05  # a stage may exceed the best balance by this fraction if that makes messages smaller


def choose_stages(problem: StageProblem) -> tuple[StagePlan, ...]:
    """The stages whose largest has the fewest FLOPs and, within TOLERANCE of that, whose cuts send the fewest bytes.

    Every stage has operations with FLOPs: raises PartitionError where the model has too few of them.
    """
    return _uniform_stages(problem.outline, problem.stages)


def uniform(graph: Graph, stages: int) -> tuple[StagePlan, ...]:
    """``graph`` in ``stages`` stages by this method."""
    return _uniform_stages(outline_of(graph), stages)


@lru_cache(1024)  # a search asks for the same stages under many schedules and placements
def _uniform_stages(outline: Outline, stages: int) -> tuple[StagePlan, ...]:
    if stages == 1:
        return stages_between([0, outline.positions[-1]])
    check_enough(outline.flops, stages)
    anywhere = [[0] * len(outline.positions)] * stages
    flops = [outline.flops] * stages
    best = smallest_maximum(flops, anywhere)
    assert best is not None, "without a memory limit there is always a partition"
    bounds = cheapest_cuts(flops, outline.sent, anywhere, best * (1 + TOLERANCE))
    assert bounds is not None
    return stages_between([outline.positions[bound] for bound in bounds])
