"""Graph -> stages. Each method is one file; ``METHODS`` is the only place that knows them by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from auto3d.capture.graph import Graph
from auto3d.errors import InputError
from auto3d.partition.autopipe import autopipe
from auto3d.partition.cost import PartitionCosts
from auto3d.partition.layer_assignment import layer_assignment
from auto3d.partition.merak import Sharding
from auto3d.partition.uniform import uniform
from auto3d.plan import StagePlan


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Stages of a Graph, and on how many devices each runs, every one with its share of the samples."""

    stages: tuple[StagePlan, ...]
    replicas: tuple[int, ...]


Method = Callable[[Graph, Sharding, PartitionCosts, int, int], Sequence[StagePlan] | Partition]

METHODS: dict[str, Method] = {  # each gets the number of stages and of micro-batches
    "uniform": lambda graph, sharding, costs, stages, micro_batches: uniform(graph, stages),
    "autopipe": lambda graph, sharding, costs, stages, micro_batches: autopipe(
        graph, costs, stages, cuts=sharding.bounds
    ),
    "layer-assignment": lambda graph, sharding, costs, stages, micro_batches: layer_assignment(
        graph, costs, stages, micro_batches=micro_batches, cuts=sharding.bounds
    ),
}


def partition(
    method: str, graph: Graph, sharding: Sharding, costs: PartitionCosts, *, stages: int, micro_batches: int
) -> Partition:
    """``stages`` stages of ``graph`` by ``method``; raises InputError where the name or a number is not possible."""
    if method not in METHODS:
        near = get_close_matches(method, METHODS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"method: {method!r} is not known; there are {', '.join(METHODS)}{hint}")
    for name, number in {"stages": stages, "micro-batches": micro_batches}.items():
        if number < 1:
            raise InputError(f"{name}: {number} is not possible; it must be 1 or more")
    found = METHODS[method](graph, sharding, costs, stages, micro_batches)
    if isinstance(found, Partition):
        return found
    return Partition(stages=tuple(found), replicas=(1,) * len(found))
