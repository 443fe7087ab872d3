"""Autopipe: contiguous stages balanced by time, forward and backward, within the memory of a device.

As AutoPipe, which Merak's partition is compared with (Merak 2023, section 5), but exact: no contiguous partition has a
faster slowest stage and, of those that are as fast, none sends less.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from auto3d.capture.graph import Graph
from auto3d.partition.contiguous import cheapest_cuts, smallest_maximum
from auto3d.partition.cost import PartitionCosts
from auto3d.partition.stage import PartitionError, check_enough, crossing_bytes, possible_cuts
from auto3d.plan import StagePlan, stages_between

_ROUNDING = 1e-12  # two sums of the same times may differ by so much


def autopipe(
    graph: Graph, costs: PartitionCosts, stages: int, *, cuts: Sequence[int] | None = None
) -> tuple[StagePlan, ...]:
    """``stages`` stages, cut at some of the positions ``cuts`` (default: wherever ``graph`` can be cut).

    Stage s holds its weights with gradients and optimizer state, and activations of the D - s micro-batches of 1F1B.
    Raises PartitionError where there are too few operations, or where no partition fits the memory of the devices.
    """
    cuts = possible_cuts(graph) if cuts is None else cuts
    seconds = [0.0, *accumulate(f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True))]
    before = [seconds[position] for position in cuts]
    check_enough(before, stages)
    earliest = [_earliest(graph, costs, cuts, in_flight=stages - stage) for stage in range(stages)]
    slowest = smallest_maximum(before, earliest)
    crossing = crossing_bytes(graph)
    bounds = None
    if slowest is not None:
        limit = slowest * (1 + _ROUNDING)
        bounds = cheapest_cuts(before, [crossing[position] for position in cuts], earliest, limit)
    if bounds is None:
        raise PartitionError(
            f"{stages} stages do not fit devices of {costs.memory_bytes / 2**30:.1f} GiB; "
            "more stages, smaller micro-batches or recomputation would need less"
        )
    return stages_between([cuts[bound] for bound in bounds])


def _earliest(graph: Graph, costs: PartitionCosts, cuts: Sequence[int], *, in_flight: int) -> list[int]:
    """For each cut, the first cut from which a stage may reach to it within the memory of a device.

    A window over the operations, of which each parameter and each tensor that is kept counts once.
    """
    if costs.memory_bytes == float("inf"):
        return [0] * len(cuts)
    sizes = {value.name: value.bytes for node in graph.nodes for value in node.outputs}
    sizes |= {name: value.bytes for name, value in graph.inputs.items()}
    held: Counter[str] = Counter()
    used = 0.0
    copies = in_flight * costs.activation_factor

    def change(position: int, by: int) -> None:
        nonlocal used
        node = graph.nodes[position]
        used += by * copies * node.saved_bytes
        for name in (*node.saves, *node.state):
            held[name] += by
            if held[name] == (1 if by > 0 else 0):
                state = graph.parameters.get(name)
                used += by * (costs.state_factor * state.bytes if state else copies * sizes.get(name, 0))

    found = [0]
    start = 0
    for place in range(1, len(cuts)):
        for position in range(cuts[place - 1], cuts[place]):
            change(position, 1)
        while used > costs.memory_bytes and start < place:
            for position in range(cuts[start], cuts[start + 1]):
                change(position, -1)
            start += 1
        found.append(start)
    return found
