"""A stage as segments: runs of operations that keep their activations, alternating with runs that are recomputed.

A segment takes values from earlier segments and gives values to later segments, so each segment can be recomputed by
itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from auto3d.capture.graph import Graph
from auto3d.partition.stage import Stage
from auto3d.plan import PlanError


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Neighbouring operations of one stage."""

    kept: bool  # True: activations stay from forward to backward; False: the segment is recomputed for the backward
    nodes: tuple[str, ...]
    state: tuple[str, ...]  # parameters, buffers and constants
    takes: tuple[str, ...]  # graph inputs, received values, and values from earlier segments
    gives: tuple[str, ...]  # values for later segments or other stages, the loss, and outputs


def segments(graph: Graph, stage: Stage, kept: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    """The segments of ``stage`` in order, divided where the ranges ``kept`` of positions begin and end.

    An operation that depends on graph inputs alone goes to the segment that first uses it. Raises PlanError if the
    operations on a written buffer end up in different segments, which could not be recomputed separately.
    """
    names = set(stage.nodes)
    positions = [position for position, node in enumerate(graph.nodes) if node.name in names]
    keeps = {position for span in kept for position in range(*span)}
    ordered = [position for position in positions if not graph.nodes[position].from_inputs] or positions
    runs = [(is_kept, list(run)) for is_kept, run in groupby(ordered, key=keeps.__contains__)]
    run_of = {position: number for number, (_, run) in enumerate(runs) for position in run}
    for position in reversed(positions):  # an operation precedes its users
        run = run_of.setdefault(position, len(runs) - 1)
        for maker in (graph.producer[name] for name in graph.nodes[position].reads if name in graph.producer):
            if graph.nodes[maker].from_inputs:
                run_of[maker] = min(run, run_of.get(maker, run))
    for buffer in sorted(graph.written_buffers.intersection(stage.state)):
        if len({run_of[position] for position in positions if buffer in graph.nodes[position].state}) > 1:
            raise PlanError(
                f"stages: stage {stage.index} keeps some of the operations on the buffer {buffer}, which the model "
                "writes to, and not others; kept must hold all of them or none"
            )

    reversed_segments: list[Segment] = []
    used = {graph.loss, *graph.outputs.values()}  # values that anything later uses
    used |= {transfer.value.name for transfer in stage.sent}
    for number, (is_kept, _) in reversed(list(enumerate(runs))):
        nodes = [graph.nodes[position] for position in positions if run_of[position] == number]
        made = dict.fromkeys(value.name for node in nodes for value in node.outputs)
        takes = dict.fromkeys(name for node in nodes for name in node.reads if name not in made)
        reversed_segments.append(
            Segment(
                kept=is_kept,
                nodes=tuple(node.name for node in nodes),
                state=tuple(dict.fromkeys(name for node in nodes for name in node.state)),
                takes=tuple(takes),
                gives=tuple(name for name in made if name in used),
            )
        )
        used |= takes.keys()
    return tuple(reversed(reversed_segments))
