"""A stage as segments: runs of operations whose activations are kept, and runs that run again before the backward.

Each takes values of those before it and gives values to those after it, so that it can be run again by itself.
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

    kept: bool  # its activations stay from the forward until the backward; else it is run again for the backward
    nodes: tuple[str, ...]
    state: tuple[str, ...]  # parameters, buffers and constants
    takes: tuple[str, ...]  # graph inputs, received values, and what earlier segments give
    gives: tuple[str, ...]  # values that later segments or other stages use, and the loss


def segments(graph: Graph, stage: Stage, kept: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    """``stage`` in its order, divided where the ranges ``kept`` of positions begin and end.

    An operation that depends on graph inputs alone goes where it is first used. Raises PlanError where the operations
    on a buffer that is written come apart: such a segment could not be run again by itself.
    """
    names = set(stage.nodes)
    own = [position for position, node in enumerate(graph.nodes) if node.name in names]
    keeps = {position for span in kept for position in range(*span)}
    ordered = [position for position in own if not graph.nodes[position].from_inputs] or own
    runs = [(is_kept, list(run)) for is_kept, run in groupby(ordered, key=keeps.__contains__)]
    run_of = {position: number for number, (_, run) in enumerate(runs) for position in run}
    for position in reversed(own):  # what uses an operation stands after it
        run = run_of.setdefault(position, len(runs) - 1)
        for maker in (graph.producer[name] for name in graph.nodes[position].reads if name in graph.producer):
            if graph.nodes[maker].from_inputs:
                run_of[maker] = min(run, run_of.get(maker, run))
    for buffer in sorted(graph.written_buffers.intersection(stage.state)):
        if len({run_of[position] for position in own if buffer in graph.nodes[position].state}) > 1:
            raise PlanError(
                f"stages: stage {stage.index} keeps some of the operations on the buffer {buffer}, which the model "
                "writes to, and not others; kept must hold all of them or none"
            )

    found: list[Segment] = []
    used = {graph.loss, *(transfer.value.name for transfer in stage.sent)}  # by what comes after, seen from the end
    for number, (is_kept, _) in reversed(list(enumerate(runs))):
        nodes = [graph.nodes[position] for position in own if run_of[position] == number]
        made = dict.fromkeys(value.name for node in nodes for value in node.outputs)
        takes = dict.fromkeys(name for node in nodes for name in node.reads if name not in made)
        found.append(
            Segment(
                kept=is_kept,
                nodes=tuple(node.name for node in nodes),
                state=tuple(dict.fromkeys(name for node in nodes for name in node.state)),
                takes=tuple(takes),
                gives=tuple(name for name in made if name in used),
            )
        )
        used |= takes.keys()
    return tuple(reversed(found))
