"""The distinct subgraphs of a model: equal subgraphs, such as the layers of a transformer, are profiled once."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from auto3d.capture.model import CapturedModel
from auto3d.derived.model import Derived
from auto3d.partition.stage import Stage, cut
from auto3d.plan import stages_between
from auto3d.share import WHOLE, Share


@dataclass(frozen=True, kw_only=True)
class ModelSubgraphs:
    """The subgraphs of a model at one micro-batch size, as a rank runs them, with equal subgraphs merged."""

    captured: CapturedModel  # the program of ``derived``, if that is there
    derived: Derived | None  # None: a rank runs all of the model
    distinct: tuple[Stage, ...]  # a subgraph of each kind
    kinds: tuple[int, ...]  # by subgraph, in the order of the model: its index in ``distinct``

    @property
    def share(self) -> Share:
        return WHOLE if self.derived is None else self.derived.share


def distinct_subgraphs(
    captured: CapturedModel,
    bounds: Sequence[int],
    *,
    derived: Derived | None = None,
) -> ModelSubgraphs:
    """The subgraphs between ``bounds``. Two are equal if their operators, shapes and arguments are.

    With ``derived``, which was made from ``captured``, they are subgraphs of the program that one of its ranks runs.
    """
    plan = stages_between(bounds)
    if derived is not None:
        captured, plan = derived.program, derived.stages(plan)
    return _distinct(captured, cut(captured.graph, plan), derived)


def distinct_stages(captured: CapturedModel, stages: Iterable[Stage]) -> ModelSubgraphs:
    """``stages`` of the whole model, which may overlap, with equal stages merged as by ``distinct_subgraphs``."""
    return _distinct(captured, stages, None)


def _distinct(captured: CapturedModel, stages: Iterable[Stage], derived: Derived | None) -> ModelSubgraphs:
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
        derived=derived,
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
    sent = [sorted(numbers[node] for node in numbers if node.name == transfer.value.name) for transfer in stage.sent]
    return *operations, str(sent), stage.has_loss
