"""The entry point: a captured model in slices of its sequence, as Seq1F1B runs it (Sun et al. 2024, section 3)."""

from dataclasses import replace

from auto3d.capture.describe import describe
from auto3d.capture.graph import Graph
from auto3d.capture.model import CapturedModel
from auto3d.derived.model import Derived
from auto3d.derived.slice_program import slice_programs
from auto3d.garbage import garbage_collection_paused
from auto3d.share import Share
from auto3d.tensor_placement import WHOLE


def sliced(captured: CapturedModel, slices: int, *, fused_attention: bool = True) -> Derived:
    """``captured`` in ``slices`` slices of its sequence; ``fused_attention`` is that of ``describe``.

    Raises PlanError where the model does not allow it: see ``slice_programs``.
    """
    position = {node.name: number for number, node in enumerate(captured.graph.nodes)}
    programs, positions = [], []
    with garbage_collection_paused():
        for made in slice_programs(captured, slices):
            graph = describe(made.exported, fused_attention=fused_attention)
            graph = _counted_in_full(_kept_by_slices(graph, made.joined), made.masked)
            programs.append(CapturedModel(graph=graph, exported=made.exported))
            positions.append(tuple(position[made.operation_of[node.name]] for node in graph.nodes))
    state = captured.graph.parameters | captured.graph.buffers
    return Derived(
        whole=captured,
        share=Share(slices=slices),
        programs=tuple(programs),
        positions=tuple(positions),
        placements=dict.fromkeys(state, WHOLE),
    )


def _kept_by_slices(graph: Graph, joined: dict[str, str]) -> Graph:
    """``graph`` whose backward keeps each slice's own keys and values, not the ones ``joined`` from all slices so far.

    ``joined`` maps the name of a joined value to that of the slice's own, which the stage holds for later slices
    anyway. It joins them again for the backward.
    """
    owner: dict[str, str] = {}  # value -> the value that owns its memory
    for node in graph.nodes:
        source = next((owner[name] for name in node.reads if name in owner), None) if node.is_view else None
        owner.update({value.name: source or value.name for value in node.outputs})

    def kept(name: str) -> str:
        own = joined.get(name)
        return name if own is None else owner.get(own, own)

    nodes = (
        node
        if joined.keys().isdisjoint(node.saves)
        else replace(node, saves=tuple(dict.fromkeys(map(kept, node.saves))))
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def _counted_in_full(graph: Graph, masked: frozenset[str]) -> Graph:
    """``graph`` with twice the FLOPs of the attentions ``masked``.

    A causal kernel skips the half of the scores that it hides, but they count in full. A slice's kernel computes every
    score up to its last token. So that times of slices and of the whole can be compared, each score that is computed
    counts twice in both.
    """
    nodes = (
        replace(node, flops=2 * node.flops, backward_flops=2 * node.backward_flops) if node.name in masked else node
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))
