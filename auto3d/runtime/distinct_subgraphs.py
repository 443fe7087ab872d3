"""The distinct subgraphs of a model: equal ones, such as the layers of a transformer, are profiled once."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from auto3d.capture.model import CapturedModel
from auto3d.partition.stage import Stage, cut
from auto3d.plan import stages_between
from auto3d.tensor.model import TensorParallelModel


@dataclass(frozen=True, kw_only=True)
class ModelSubgraphs:
    """The subgraphs of a model at one micro-batch size, as a rank runs them, with equal ones merged."""

    captured: CapturedModel  # the local program of ``tensor``, if that is there
    tensor: TensorParallelModel | None
    sequence_parallel: bool
    distinct: tuple[Stage, ...]  # one for each kind of subgraph
    kinds: tuple[int, ...]  # by subgraph, in the order of the model: its index in ``distinct``

    @property
    def tp(self) -> int:
        return 1 if self.tensor is None else self.tensor.shards


def distinct_subgraphs(
    captured: CapturedModel,
    bounds: Sequence[int],
    *,
    tensor: TensorParallelModel | None = None,
    sequence_parallel: bool = False,
) -> ModelSubgraphs:
    """The subgraphs between ``bounds``. Two are equal if their operators, shapes and arguments are.

    With ``tensor``, which was made from ``captured``, they are those of the program that one of its ranks runs.
    """
    plan = stages_between(bounds)
    if tensor is not None:
        captured, plan = tensor.local, tensor.stages(plan)
    stages = cut(captured.graph, plan)
    numbers: dict[tuple, int] = {}
    distinct: list[Stage] = []
    kinds: list[int] = []
    for stage in stages:
        signature = _signature(captured, stage)
        if signature not in numbers:
            numbers[signature] = len(distinct)
            distinct.append(stage)
        kinds.append(numbers[signature])
    return ModelSubgraphs(
        captured=captured,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        distinct=tuple(distinct),
        kinds=tuple(kinds),
    )


def _signature(captured: CapturedModel, stage: Stage) -> tuple:
    """Equal for subgraphs that compute the same: values are numbered in the order of their first use, not named."""
    graph, exported = captured.graph, captured.exported
    inside = set(stage.nodes)
    numbers: dict[fx.Node, int] = {}
    operations: list[tuple[str, str]] = []

    def numbered(node: fx.Node) -> Any:
        number = numbers.setdefault(node, len(numbers))
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return number
        name = exported.parameters.get(node.name, node.name)
        trains = name in graph.trained if name in graph.parameters else name not in graph.inputs
        return number, tuple(value.shape), str(value.dtype), trains

    for node in exported.program.nodes:
        if node.name in inside or (node.target is operator.getitem and node.args[0].name in inside):
            operations.append((str(node.target), repr(fx.map_arg((node.args, node.kwargs), numbered))))
            numbers.setdefault(node, len(numbers))
    sent = [sorted(numbers[node] for node in numbers if node.name == one.value.name) for one in stage.sent]
    return *operations, str(sent), stage.has_loss
