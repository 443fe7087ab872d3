"""The entry point: a captured model in slices of its sequence, as Seq1F1B runs it (Sun et al. 2024, section 3)."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from auto3d.capture.describe import describe, is_random
from auto3d.capture.graph import Graph
from auto3d.capture.model import CapturedModel
from auto3d.derived.model import Derived
from auto3d.derived.shards import tensor_parallel
from auto3d.derived.slice_program import slice_programs
from auto3d.garbage import garbage_collection_paused
from auto3d.plan import PlanError
from auto3d.share import Share
from auto3d.tensor_placement import WHOLE, Split, TensorPlacement


def sliced(
    captured: CapturedModel,
    slices: int,
    *,
    tp: int = 1,
    split: Mapping[str, Split] | None = None,
    fused_attention: bool = True,
) -> Derived:
    """``captured`` in ``slices`` slices of its sequence, each divided among ``tp`` shards as ``split`` says.

    ``fused_attention`` is the argument of ``describe``. Raises PlanError where the model does not allow it: see
    ``slice_programs`` and ``tensor_parallel``, and where the shards of two slices would hold different values.
    """
    position = {node.name: number for number, node in enumerate(captured.graph.nodes)}
    state = (*captured.graph.parameters, *captured.graph.buffers, *captured.exported.constants)
    placements: dict[str, TensorPlacement] = dict.fromkeys(state, WHOLE)
    programs: list[CapturedModel] = []
    positions: list[tuple[int, ...]] = []
    drawn: set[str] = set()
    with garbage_collection_paused():
        for made in slice_programs(captured, slices):
            graph, exported = describe(made.exported, fused_attention=fused_attention), made.exported
            of_slice = tuple(position[made.operation_of[node.name]] for node in graph.nodes)
            if tp > 1:
                of_shard = tensor_parallel(
                    CapturedModel(graph=graph, exported=exported),
                    Share(tp=tp),
                    split=split,
                    fused_attention=fused_attention,
                )
                if programs:
                    _check_alike(placements, drawn, of_shard, made.joined)
                placements |= of_shard.placements
                drawn |= of_shard.drawn_per_shard
                graph, exported = of_shard.program.graph, of_shard.program.exported
                of_slice = tuple(of_slice[place] for place in of_shard.positions[0])
            graph = _counted_in_full(_kept_by_slices(graph, made.joined), made.masked)
            programs.append(CapturedModel(graph=graph, exported=exported))
            positions.append(of_slice)
    return Derived(
        whole=captured,
        share=Share(tp=tp, slices=slices),
        programs=tuple(programs),
        positions=tuple(positions),
        placements=placements,
        drawn_per_shard=frozenset(drawn),
    )


def _check_alike(
    placements: Mapping[str, TensorPlacement], drawn: Collection[str], of_shard: Derived, joined: Iterable[str]
) -> None:
    """Raise PlanError if the shards of a slice hold state, or keys and values, in another way than earlier slices, or
    draw other numbers of their own."""
    held = {*of_shard.whole.graph.parameters, *of_shard.whole.graph.buffers, *joined}
    differs = {name for name in held & placements.keys() if placements[name] != of_shard.placements.get(name)}
    random = {node.name for node in of_shard.program.exported.program.nodes if is_random(node)}
    differs |= {name for name in random if (name in drawn) != (name in of_shard.drawn_per_shard)}
    if differs:
        raise PlanError(
            f"tp: {of_shard.share.tp}; ranks would hold {min(differs)} in one slice of the sequence in another way "
            "than in the next; use tp = 1, or a schedule without slices"
        )


def _kept_by_slices(graph: Graph, joined: dict[str, str]) -> Graph:
    """``graph`` whose backward keeps each slice's own keys and values, not the keys and values of all slices so far.

    ``joined`` maps the name of a joined value to the name of the slice's own value, which the stage holds for later
    slices anyway. The stage joins the values again for the backward.
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
