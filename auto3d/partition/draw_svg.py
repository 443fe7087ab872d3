"""A partition as an SVG picture: one row for each stage, one cell for each subgraph, as wide as its FLOPs."""

from collections.abc import Sequence
from xml.etree import ElementTree

from auto3d.capture.graph import Graph
from auto3d.partition import Partition
from auto3d.partition.merak import Sharding

ROW, CELL = 30, 22  # heights in pixels
LEFT, TOP, WIDTH, RIGHT = 64, 34, 900, 240
_COLOURS = ("#4878a8", "#8fb3d5")  # neighbouring subgraphs differ
_INK = "#222222"


def draw_partition_svg(
    graph: Graph, sharding: Sharding, partition: Partition, notes: Sequence[str], caption: str
) -> str:
    """The text of an SVG file; ``notes[i]`` stands at the end of the row of stage i."""
    flops = [_stage_flops(graph, sharding, stage.operations) for stage in partition.stages]
    widest = max(sum(cells.values()) for cells in flops) or 1
    width, height = LEFT + WIDTH + RIGHT, TOP + len(flops) * ROW + 10
    svg = ElementTree.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}", width=str(width), height=str(height)
    )
    ElementTree.SubElement(svg, "style").text = f"text{{font:12px sans-serif;fill:{_INK}}}"
    _text(svg, LEFT, 20, caption)
    for stage, cells in enumerate(flops):
        top = TOP + stage * ROW
        _text(svg, 4, top + CELL - 6, f"stage {stage}")
        x = float(LEFT)
        for subgraph, cost in cells.items():
            cell = ElementTree.SubElement(
                svg,
                "rect",
                x=f"{x:.2f}",
                y=str(top),
                width=f"{cost / widest * WIDTH:.2f}",
                height=str(CELL),
                fill=_COLOURS[subgraph % 2],
            )
            ElementTree.SubElement(cell, "title").text = f"subgraph {subgraph}: {cost / 1e9:,.1f} GFLOP forward"
            x += cost / widest * WIDTH
        _text(svg, x + 8, top + CELL - 6, notes[stage])
    ElementTree.indent(svg, " ")
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _stage_flops(graph: Graph, sharding: Sharding, spans: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Number of a subgraph -> FLOPs of its operations that the stage holds."""
    held = {position for span in spans for position in range(*span)}
    flops = {
        number: sum(graph.nodes[position].flops for position in positions if position in held)
        for number, positions in enumerate(sharding.subgraphs)
    }
    return {number: cost for number, cost in flops.items() if cost}


def _text(parent: ElementTree.Element, x: float, y: float, text: str) -> None:
    ElementTree.SubElement(parent, "text", x=f"{x:.2f}", y=str(y)).text = text
