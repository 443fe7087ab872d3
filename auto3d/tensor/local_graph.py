"""The Graph of a tensor-parallel rank for planning: all that the cost model needs, without torch and the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from auto3d.capture.graph import Graph
from auto3d.capture.graph_json import graph_from_json, graph_to_json
from auto3d.capture.interpolate import interpolate
from auto3d.errors import InputError
from auto3d.tensor_placement import Kind, Split

if TYPE_CHECKING:
    from auto3d.tensor.model import TensorParallelModel


@dataclass(frozen=True, kw_only=True)
class LocalGraph:
    """What each of ``shards`` ranks runs of a whole Graph; see ``auto3d.tensor.model.TensorParallelModel``."""

    graph: Graph
    positions: tuple[int, ...]  # position in the whole Graph of the operation that each node belongs to, ascending
    shards: int
    copied: frozenset[str]  # parameters of which each rank computes a part of the gradient's sum
    split: Mapping[str, Split]  # how the parameters and buffers are split, as a Plan says it


def local_graph(model: TensorParallelModel, graph: Graph | None = None) -> LocalGraph:
    """The LocalGraph of ``model``; ``graph`` is another description of its local program, if there is one."""
    copied = (n for n in model.local.graph.parameters if model.placements[n].kind is Kind.COPIED)
    return LocalGraph(
        graph=graph or model.local.graph,
        positions=model.positions,
        shards=model.shards,
        copied=frozenset(copied),
        split=model.split,
    )


def interpolate_local(first: LocalGraph, second: LocalGraph, micro_batch_size: int) -> LocalGraph:
    """The LocalGraph for micro-batches of ``micro_batch_size`` samples, from those at two other sizes.

    Raises InputError if the ranks run other operations at one of the two sizes than at the other.
    """
    if (first.positions, first.copied, first.split) != (second.positions, second.copied, second.split):
        raise InputError(
            f"the model is split in another way at micro-batch size {first.graph.micro_batch_size} than at "
            f"{second.graph.micro_batch_size}, so its cost at {micro_batch_size} cannot be interpolated; capture it at "
            f"{micro_batch_size} instead"
        )
    return replace(first, graph=interpolate(first.graph, second.graph, micro_batch_size))


def local_graph_to_json(local: LocalGraph) -> dict[str, Any]:
    """``local`` as lists, dicts, strings, numbers and Booleans."""
    return {
        "graph": graph_to_json(local.graph),
        "positions": list(local.positions),
        "shards": local.shards,
        "copied": sorted(local.copied),
        "split": {name: [split.dim, list(split.blocks)] for name, split in local.split.items()},
    }


def local_graph_from_json(content: Mapping[str, Any]) -> LocalGraph:
    """The LocalGraph from which ``local_graph_to_json`` made ``content``."""
    return LocalGraph(
        graph=graph_from_json(content["graph"]),
        positions=tuple(content["positions"]),
        shards=content["shards"],
        copied=frozenset(content["copied"]),
        split={name: Split(dim, tuple(blocks)) for name, (dim, blocks) in content["split"].items()},
    )
