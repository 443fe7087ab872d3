"""The figures of a recipe's captured model."""

import resource
from dataclasses import dataclass
from math import prod
from time import perf_counter

from launch.model.check_capture import check_at
from launch.model.graphs import PlanningModel, default_micro_batch_size
from launch.recipe.load import LoadedRecipe


@dataclass(frozen=True)
class CaptureFigures:
    """Size and cost of a model for one micro-batch, and what its capture took."""

    micro_batch_size: int
    parameters: int
    parameter_bytes: int
    flops: int
    backward_flops: int
    operations: int
    subgraphs: int
    common: dict[str, int]  # value that passes through subgraphs which do not use it -> number of its users
    first_user: dict[str, int]  # input -> first subgraph that uses it
    seconds: float
    peak_bytes: int  # peak memory of this process
    cached: bool
    graph: str  # fingerprint
    check: str | None  # result of the comparison with the eager module, if it was asked for


def capture_figures(
    recipe: LoadedRecipe, *, micro_batch_size: int | None, subgraphs: int | None, fresh: bool, check: bool
) -> CaptureFigures:
    """Capture and shard the recipe's model; ``check`` compares the capture with the eager module."""
    begin = perf_counter()
    model = PlanningModel(recipe, fresh=fresh)
    graph = model.graph(micro_batch_size or default_micro_batch_size(recipe))
    sharding = model.sharding(graph, subgraphs)
    seconds = perf_counter() - begin
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return CaptureFigures(
        micro_batch_size=graph.micro_batch_size,
        parameters=sum(prod(value.shape) for value in graph.parameters.values()),
        parameter_bytes=sum(value.bytes for value in graph.parameters.values()),
        flops=sum(node.flops for node in graph.nodes),
        backward_flops=sum(node.backward_flops for node in graph.nodes),
        operations=len(graph.nodes),
        subgraphs=len(sharding.subgraphs),
        common=sharding.common,
        first_user=sharding.first_user,
        seconds=seconds,
        peak_bytes=peak_bytes,
        cached=not model.captured,
        graph=graph.fingerprint,
        check=check_at(recipe, graph.micro_batch_size) if check else None,
    )
