"""Uniform partition: contiguous stages of nearly equal FLOPs, cut where little has to be sent."""

from itertools import accumulate

from auto3d.capture.graph import Graph
from auto3d.partition.contiguous import cheapest_cuts, smallest_maximum
from auto3d.partition.stage import check_enough, crossing_bytes, possible_cuts
from auto3d.plan import StagePlan, stages_between

TOLERANCE = 0.05  # a stage may exceed the best balance by this share if that makes messages smaller


def uniform(graph: Graph, stages: int) -> tuple[StagePlan, ...]:
    """Cut ``graph`` so that the largest stage has the fewest FLOPs and, within TOLERANCE, the cuts the fewest bytes.

    Every stage has operations that cost something: raises PartitionError where there are too few of them.
    """
    if stages == 1:
        return stages_between([0, len(graph.nodes)])
    positions = possible_cuts(graph)
    flops = [0, *accumulate(node.flops for node in graph.nodes)]  # before each operation
    before = [flops[position] for position in positions]
    check_enough(before, stages)
    anywhere = [[0] * len(positions)] * stages
    limit = int(smallest_maximum(before, anywhere) * (1 + TOLERANCE))
    crossing = crossing_bytes(graph)
    bounds = cheapest_cuts(before, [crossing[position] for position in positions], anywhere, limit)
    return stages_between([positions[bound] for bound in bounds])
