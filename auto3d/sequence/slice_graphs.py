"""The Graphs of a model's slices for planning: all that the cost model needs, without torch and the programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from auto3d.tensor.local_graph import LocalGraph

if TYPE_CHECKING:
    from auto3d.sequence.sliced import SlicedModel


def slice_graphs(model: SlicedModel) -> tuple[LocalGraph, ...]:
    """What each slice of ``model`` runs, in order; no state is split."""
    return tuple(
        LocalGraph(graph=program.graph, positions=positions, shards=1, copied=frozenset(), split={})
        for program, positions in zip(model.programs, model.positions, strict=True)
    )
