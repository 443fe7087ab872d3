"""Memory over time as an SVG picture: one row per device, with its peak."""

from collections.abc import Sequence
from xml.etree import ElementTree

from auto3d.simulate.memory_timeline import BytesOverTime

ROW, CURVE = 64, 48  # heights
LEFT, TOP, WIDTH = 56, 36, 900
_FILL, _LIMIT, _INK = "#8fb4d9", "#d00000", "#222222"


def draw_memory_svg(curves: Sequence[BytesOverTime], capacity: Sequence[float | None], *, caption: str) -> str:
    """The text of an SVG file. ``capacity`` has the bytes of each device, or None; a red line marks those in range."""
    end = max((curve.times[-1] for curve in curves), default=0.0) or 1.0
    highest = max((curve.peak for curve in curves), default=0.0) or 1.0
    svg = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg")
    svg.set("font-family", "sans-serif")
    svg.set("font-size", "11")
    _text(svg, LEFT, 18, caption)
    for device, (curve, limit) in enumerate(zip(curves, capacity, strict=True)):
        bottom = TOP + device * ROW + CURVE
        points: list[tuple[float, float]] = [(LEFT, bottom)]
        ends = [*curve.times[1:], end]
        for begin, until, held in zip(curve.times, ends, curve.held, strict=True):
            y = bottom - CURVE * held / highest
            points += [(LEFT + WIDTH * begin / end, y), (LEFT + WIDTH * until / end, y)]
        points.append((LEFT + WIDTH, bottom))
        outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        ElementTree.SubElement(
            svg, "polygon", {"points": outline, "fill": _FILL, "stroke": _INK, "stroke-width": "0.5"}
        )
        if limit is not None and limit <= highest:
            height = f"{bottom - CURVE * limit / highest:.1f}"
            line = {"x1": f"{LEFT}", "x2": f"{LEFT + WIDTH}", "y1": height, "y2": height, "stroke": _LIMIT}
            ElementTree.SubElement(svg, "line", line)
        _text(svg, LEFT - 8, bottom - 4, f"P{device}", anchor="end")
        _text(svg, LEFT + WIDTH + 8, bottom - CURVE + 10, f"{curve.peak / 2**30:.3g} GiB")
    bottom = TOP + len(curves) * ROW
    _text(svg, LEFT, bottom, "0")
    _text(svg, LEFT + WIDTH, bottom, f"{end:.4g} s", anchor="end")
    svg.set("viewBox", f"0 0 {LEFT + WIDTH + 90} {bottom + 12}")
    ElementTree.indent(svg, " ")
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _text(parent: ElementTree.Element, x: float, y: float, words: str, *, anchor: str = "start") -> None:
    attributes = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor}
    ElementTree.SubElement(parent, "text", attributes).text = words
