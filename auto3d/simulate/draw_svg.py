"""A timeline as an SVG picture in the style of the papers: one row per device, micro-batch numbers in the cells."""

from math import floor, log10
from xml.etree import ElementTree

from auto3d.schedule.operation import Kind
from auto3d.simulate.cells import (
    SHADE,
    TINTS,
    WORDS,
    exposed_collectives,
    has_exposed_collectives,
    micro_batch_label,
    tints,
)
from auto3d.simulate.critical_path import critical_numbers
from auto3d.simulate.idle import bubble_ratio
from auto3d.simulate.simulate import Timeline
from auto3d.simulate.work import recomputed_inside

ROW, CELL, SYNC_LANE = 30, 22, 6  # heights
LEFT, TOP, WIDEST = 56, 30, 1600
DIGIT = 6.2  # width of a character in a cell

_SYNC, _IDLE, _CRITICAL, _INK, _COLLECTIVES = "#b03060", "#f1f1f1", "#d00000", "#222222", "#7a7a7a"


def draw_svg(timeline: Timeline, *, unit: str = "", tp: int = 1) -> str:
    """The text of an SVG file; ``unit`` names the unit of the times on the axis, and each row is ``tp`` ranks.

    Forwards are light and backwards dark, in the colour of their pipe or chunk. Recomputation is hatched and idle time
    is grey. A line under a row is a gradient sync: thin while it waits for other devices, thick while it runs. A
    dark end of a cell is the time of tensor-parallel collectives that nothing hides. The dotted line is the critical
    path.
    """
    schedule = timeline.schedule
    scale = _scale(timeline)
    bottom = TOP + schedule.devices * ROW
    svg = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg")
    _style(svg, count=1 + max(tints(schedule)[1].values()))
    caption = (
        f"{schedule.name}: {schedule.devices} devices{f' of tp = {tp} ranks' if tp > 1 else ''}, "
        f"{schedule.micro_batches} micro-batches; "
        f"makespan {timeline.makespan:.6g}{unit}, bubble ratio {bubble_ratio(timeline):.3g} (simulated)"
    )
    width = LEFT + max(timeline.makespan * scale, 7 * len(caption)) + 20
    _text(svg, LEFT, 18, caption, weight="bold")
    for device in range(schedule.devices):
        top = TOP + device * ROW
        _text(svg, LEFT - 8, top + CELL - 6, f"P{device}", anchor="end")
        _rect(svg, LEFT, top, timeline.makespan * scale, CELL, fill=_IDLE)
    _cells(svg, timeline, scale)
    _syncs(svg, timeline, scale)
    _critical(svg, timeline, scale)
    _axis(svg, timeline, scale, bottom + 4, unit)
    height = _legend(svg, timeline, bottom + 40, width)
    svg.set("viewBox", f"0 0 {_number(width)} {_number(height)}")
    svg.set("width", _number(width))
    svg.set("height", _number(height))
    ElementTree.indent(svg, " ")
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _scale(timeline: Timeline) -> float:
    """Points per unit of time: enough for the labels in the shortest cell, up to a picture of width WIDEST."""
    if not timeline.makespan:
        return 1.0
    needed = 1.0
    for number, operation in enumerate(timeline.operations):
        duration = timeline.end[number] - timeline.start[number]
        if operation.micro_batches and duration > 0:
            needed = max(needed, (len(micro_batch_label(timeline.schedule, operation)) * DIGIT + 6) / duration)
    return min(max(needed, 20 / _shortest(timeline)), WIDEST / timeline.makespan)


def _shortest(timeline: Timeline) -> float:
    durations = (end - start for start, end in zip(timeline.start, timeline.end, strict=True))
    return min((duration for duration in durations if duration > 0), default=1.0)


def _style(svg: ElementTree.Element, count: int) -> None:
    rules = [
        "text{font:11px sans-serif;fill:" + _INK + "}",
        ".cell rect{stroke:#fff;stroke-width:1}",
        ".cell text{text-anchor:middle}",
        ".dark text{fill:#fff}",
    ]
    for tint in range(min(count, len(TINTS))):
        rules += [f".t{tint}k{shade}{{fill:{colour}}}" for shade, colour in enumerate(TINTS[tint])]
    ElementTree.SubElement(svg, "style").text = "".join(rules)
    hatch = ElementTree.SubElement(
        ElementTree.SubElement(svg, "defs"),
        "pattern",
        id="hatch",
        width="5",
        height="5",
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )
    ElementTree.SubElement(hatch, "rect", width="1.2", height="5", fill="#8a8a8a")


def _cells(svg: ElementTree.Element, timeline: Timeline, scale: float) -> None:
    inside = recomputed_inside(timeline.schedule)
    _, tint_of = tints(timeline.schedule)
    for number, operation in enumerate(timeline.operations):
        start, end = timeline.start[number], timeline.end[number]
        if operation.kind in (Kind.SYNC, Kind.UPDATE) and end == start:
            continue
        x, width = LEFT + start * scale, (end - start) * scale
        top = TOP + timeline.device_of(operation) * ROW
        shade, tint = SHADE[operation.kind], tint_of[operation.stage, operation.pipe] % len(TINTS)
        cell = ElementTree.SubElement(svg, "g", {"class": "cell dark" if shade == 2 else "cell"})
        ElementTree.SubElement(cell, "title").text = f"{operation} {start:.6g} to {end:.6g}"
        _rect(cell, x, top, width, CELL, css=f"t{tint}k{shade}")
        hatched = width if operation.kind is Kind.RECOMPUTE else 0.0
        if number in inside:
            factor = inside[number] / timeline.schedule.parts / timeline.costs.speed[timeline.device_of(operation)]
            hatched = timeline.costs.recompute[operation.stage] * factor * scale
        if hatched:
            _rect(cell, x, top, hatched, CELL, css=f"t{tint}k0")
            _rect(cell, x, top, hatched, CELL, fill="url(#hatch)")
        exposed = exposed_collectives(timeline, number, recomputes=number in inside) * scale
        if exposed:
            _rect(cell, x + width - exposed, top, exposed, CELL, fill=_COLLECTIVES)
        label = micro_batch_label(timeline.schedule, operation) or str(operation.kind)
        rest = hatched if number in inside else 0.0
        free = width - rest - exposed
        if len(label) * DIGIT <= free:
            _text(cell, x + rest + free / 2, top + CELL - 7, label)


def _syncs(svg: ElementTree.Element, timeline: Timeline, scale: float) -> None:
    lanes: dict[int, int] = {}
    for sync in sorted(timeline.syncs, key=lambda sync: sync.begin):
        if sync.end == sync.begin:
            continue
        for device, started in sync.started.items():
            lane = lanes[device] = (lanes.get(device, -1) + 1) % 2
            y = TOP + device * ROW + CELL + 1 + lane * SYNC_LANE / 2
            group = ElementTree.SubElement(svg, "g", {"class": "sync"})
            text = f"sync of stage {sync.stage}: started {started:.6g}, runs {sync.begin:.6g} to {sync.end:.6g}"
            ElementTree.SubElement(group, "title").text = text
            _rect(group, LEFT + started * scale, y + 1, (sync.begin - started) * scale, 0.8, fill=_SYNC)
            _rect(group, LEFT + sync.begin * scale, y, (sync.end - sync.begin) * scale, 2.6, fill=_SYNC)


def _critical(svg: ElementTree.Element, timeline: Timeline, scale: float) -> None:
    points = []
    for number in critical_numbers(timeline):
        operation = timeline.operations[number]
        start, end = timeline.start[number], timeline.end[number]
        if operation.kind is Kind.SYNC:
            end = timeline.arrival[number]
        if end > start:
            y = TOP + timeline.device_of(operation) * ROW + CELL - 3
            points += [f"{_number(LEFT + time * scale)},{_number(y)}" for time in (start, end)]
    ElementTree.SubElement(
        svg,
        "polyline",
        {
            "class": "critical",
            "points": " ".join(points),
            "fill": "none",
            "stroke": _CRITICAL,
            "stroke-width": "1.6",
            "stroke-dasharray": "2 2",
        },
    )


def _axis(svg: ElementTree.Element, timeline: Timeline, scale: float, y: float, unit: str) -> None:
    length = timeline.makespan * scale
    _rect(svg, LEFT, y, length, 1, fill=_INK)
    step = _tick_step(timeline.makespan, room=length / 45)
    for tick in range(floor(timeline.makespan / step + 1e-9) + 1):
        x = LEFT + tick * step * scale
        _rect(svg, x, y, 1, 4, fill=_INK)
        _text(svg, x, y + 15, f"{tick * step:.6g}{unit}", anchor="middle")
    _text(svg, LEFT - 8, y + 15, "time", anchor="end")


def _tick_step(makespan: float, room: float) -> float:
    """The distance of ticks: 1, 2 or 5 times a power of ten, and at most ``room`` ticks."""
    if not makespan:
        return 1.0
    least = makespan / max(room, 1)
    power = 10.0 ** floor(log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _legend(svg: ElementTree.Element, timeline: Timeline, y: float, width: float) -> float:
    """Draw the legend; returns the height that the picture needs."""
    x = float(LEFT)

    def place(words: str) -> tuple[float, float]:
        nonlocal x, y
        room = 24 + len(words) * 5.8 + 14
        if x > LEFT and x + room > width:
            x, y = float(LEFT), y + 20
        here = x
        x += room
        _text(svg, here + 24, y + 10, words)
        return here, y

    kinds = {operation.kind for operation in timeline.operations}
    if timeline.makespan and not any(timeline.costs.update):
        kinds.discard(Kind.UPDATE)
    if not any(timeline.costs.sync_start):
        kinds.discard(Kind.SYNC)
    word, tint_of = tints(timeline.schedule)
    count = 1 + max(tint_of.values())
    inside = bool(recomputed_inside(timeline.schedule))
    for kind, words in WORDS.items():
        if kind not in kinds and not (kind is Kind.RECOMPUTE and inside):
            continue
        left, top = place(words)
        shown = min(count, len(TINTS))
        for tint in range(shown):
            _rect(svg, left + tint * 18 / shown, top, 18 / shown, 12, css=f"t{tint}k{SHADE[kind]}")
        if kind is Kind.RECOMPUTE:
            _rect(svg, left, top, 18, 12, fill="url(#hatch)")
    for tint in range(count if count > 1 else 0):
        left, top = place(f"{word} {tint}")
        _rect(svg, left, top, 9, 12, css=f"t{tint % len(TINTS)}k0")
        _rect(svg, left + 9, top, 9, 12, css=f"t{tint % len(TINTS)}k2")
    if has_exposed_collectives(timeline):
        left, top = place("exposed collectives")
        _rect(svg, left, top, 18, 12, fill=_COLLECTIVES)
    left, top = place("idle")
    _rect(svg, left, top, 18, 12, fill=_IDLE)
    if any(sync.end > sync.begin for sync in timeline.syncs):
        left, top = place("gradient sync: waits, runs")
        _rect(svg, left, top + 6, 9, 0.8, fill=_SYNC)
        _rect(svg, left + 9, top + 5, 9, 2.6, fill=_SYNC)
    left, top = place("critical path")
    line = {"stroke": _CRITICAL, "stroke-width": "1.6", "stroke-dasharray": "2 2"}
    middle = _number(top + 6)
    ElementTree.SubElement(
        svg, "line", {"x1": _number(left), "x2": _number(left + 18), "y1": middle, "y2": middle} | line
    )
    return y + 24


def _rect(
    parent: ElementTree.Element, x: float, y: float, width: float, height: float, *, fill: str = "", css: str = ""
) -> None:
    attributes = {"x": _number(x), "y": _number(y), "width": _number(width), "height": _number(height)}
    ElementTree.SubElement(parent, "rect", attributes | ({"fill": fill} if fill else {"class": css}))


def _text(parent: ElementTree.Element, x: float, y: float, words: str, *, anchor: str = "", weight: str = "") -> None:
    attributes = {"x": _number(x), "y": _number(y)}
    if anchor:
        attributes["text-anchor"] = anchor
    if weight:
        attributes["font-weight"] = weight
    ElementTree.SubElement(parent, "text", attributes).text = words


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
