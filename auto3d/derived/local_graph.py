"""The Graphs of derived programs for planning: all that the cost model needs, without torch and the programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from auto3d.capture.graph import Graph
from auto3d.capture.graph_json import graph_from_json, graph_to_json
from auto3d.tensor_placement import PlacementKind, Split

if TYPE_CHECKING:
    from auto3d.derived.model import Derived


@dataclass(frozen=True, kw_only=True)
class LocalGraph:
    """What each of ``shards`` ranks runs of a whole Graph, for all tokens or for a slice of them; see ``Derived``."""

    graph: Graph
    positions: tuple[int, ...]  # position in the whole Graph of the operation that each node belongs to, ascending
    shards: int
    copied: frozenset[str]  # parameters of which each rank computes a part of the gradient's sum
    split: Mapping[str, Split]  # how the parameters and buffers are split, as a Plan says it


def local_graphs(model: Derived) -> tuple[LocalGraph, ...]:
    """The LocalGraph of each program of ``model``."""
    parameters, split = model.whole.graph.parameters, model.split
    copied = frozenset(n for n in parameters if model.placements[n].kind is PlacementKind.COPIED)
    return tuple(
        LocalGraph(graph=program.graph, positions=positions, shards=model.share.tp, copied=copied, split=split)
        for program, positions in zip(model.programs, model.positions, strict=True)
    )


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
