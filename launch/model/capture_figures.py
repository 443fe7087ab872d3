"""The figures of a recipe's captured model."""

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING

from auto3d.process_memory import status_bytes
from auto3d.share import Share
from launch.model.capture_process import CaptureProcess
from launch.model.check_capture import check_at
from launch.model.graphs import PlanningModel, default_micro_batch_size, refused_rules
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import device
from launch.run.devices import torch_has_cuda
from launch.run.streams import stdout_to_stderr

if TYPE_CHECKING:
    from auto3d.derived.explain import Explanation


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
    tensor: "Explanation | None"  # tensor parallelism at a degree, if it was asked for


def capture_figures(
    recipe: LoadedRecipe,
    *,
    micro_batch_size: int | None,
    subgraphs: int | None,
    fresh: bool,
    check: bool,
    share: Share | None,
) -> CaptureFigures:
    """Capture and shard the recipe's model; ``check`` compares the capture with the eager module.

    With ``share``, the figures say what tensor-parallel ranks that have it split and exchange. Raises RecipeError if a
    rule of the recipe is not possible.
    """
    begin = perf_counter()
    model = PlanningModel(recipe, fresh=fresh)
    graph = model.graph(micro_batch_size or default_micro_batch_size(recipe))
    sharding = model.sharding(graph, subgraphs)
    seconds = perf_counter() - begin
    peak_bytes = status_bytes("VmHWM")
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
        tensor=None if share is None else _tensor_figures(recipe, graph.micro_batch_size, share),
    )


def _tensor_figures(recipe: LoadedRecipe, micro_batch_size: int, share: Share) -> "Explanation":
    explain = partial(_explained, share)
    with refused_rules(recipe):
        if device(recipe.values) == "cuda" and torch_has_cuda():
            with CaptureProcess() as process:
                explanation: Explanation = process.call(explain, recipe, micro_batch_size)
                return explanation
        return explain(recipe, micro_batch_size)


def _explained(share: Share, recipe: LoadedRecipe, micro_batch_size: int) -> "Explanation":
    """What tensor-parallel ranks with ``share`` of its work make of the recipe's model."""
    from auto3d.derived.explain import explain  # they import torch
    from auto3d.derived.of_share import derived
    from auto3d.derived.planned_split import ruled_reasons

    model, rules = PlanningModel(recipe), recipe.values.model.tensor_parallel
    split = model.split_here(micro_batch_size, share)
    captured = model.program(micro_batch_size)
    with stdout_to_stderr():
        reasons = ruled_reasons(captured, share.tp, rules=rules)
        explanation = explain(derived(captured, share, split=split))
    weights = (
        weight if weight.split is not None else replace(weight, reason=reasons.get(weight.weight, weight.reason))
        for weight in explanation.weights
    )
    return replace(explanation, weights=tuple(weights))
