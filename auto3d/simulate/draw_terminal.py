"""A timeline as text for a terminal: one row per device and, if they fit, one character per unit of time."""

import re

from rich.style import Style
from rich.text import Text

from auto3d.schedule.operation import Kind
from auto3d.simulate.cells import WORDS, exposed_collectives, has_exposed_collectives, micro_batch_label, tints
from auto3d.simulate.simulate import Timeline
from auto3d.simulate.work import recomputed_inside

_COLOURS = ("blue", "yellow", "green", "magenta")  # by pipe or chunk; every terminal has these named colours
_IDLE, _SYNC, _RECOMPUTE, _COLLECTIVES = "·", "~", "/", "="
_FAINT, _OF_SYNC = Style(dim=True), Style(color="magenta")


def draw_terminal(timeline: Timeline, *, width: int, colour: bool) -> Text:
    """The drawing, with lines of at most ``width`` characters, but at least 20 characters of timeline.

    A micro-batch number stands at the start of its cell, after the characters that show recomputation. If it does not
    fit, its last digits are shown. Without ``colour``, a second line under each device shows the kinds of operations.
    """
    schedule = timeline.schedule
    margin = len(f"P{schedule.devices - 1}") + 2
    room = max(width - margin, 20)
    unit = _unit(timeline)
    fits = timeline.makespan <= room * unit
    cell = unit if fits else timeline.makespan / room
    length = round(timeline.makespan / cell)
    _, tint_of = tints(schedule)
    inside = recomputed_inside(schedule)

    text = Text(no_wrap=True)
    for device in range(schedule.devices):
        row, styles, kinds = [_IDLE] * length, [_FAINT] * length, [" "] * length
        for sync in timeline.syncs:
            if device in sync.started:
                for place in range(round(sync.begin / cell), min(round(sync.end / cell), length)):
                    row[place], styles[place] = _SYNC, _OF_SYNC
        for number in timeline.numbers(device):
            operation = timeline.operations[number]
            start, end = round(timeline.start[number] / cell), round(timeline.end[number] / cell)
            if end == start:
                continue
            recomputed = 0  # characters that show recomputation
            if number in inside:
                factor = inside[number] / schedule.parts / timeline.costs.speed[device]
                recomputed = min(round(timeline.costs.recompute[operation.stage] * factor / cell), end - start - 1)
            exposed = exposed_collectives(timeline, number, recomputes=number in inside)
            exchanging = min(round(exposed / cell), end - start - recomputed - 1)
            computing = end - start - recomputed - exchanging
            label = _fitting(micro_batch_label(schedule, operation) or str(operation.kind), computing)
            filler = _RECOMPUTE if operation.kind is Kind.RECOMPUTE else " "
            row[start:end] = _RECOMPUTE * recomputed + label.ljust(computing, filler) + _COLLECTIVES * exchanging
            style = _style(operation.kind, tint_of[operation.stage, operation.pipe])
            styles[start:end] = [style] * (end - start)
            kinds[start:end] = str(operation.kind) * (end - start)
        text.append(f"P{device}".ljust(margin))
        for sign, style in zip(row, styles, strict=True):
            text.append(sign, style if colour else None)
        text.append("\n")
        if not colour:
            text.append(" " * margin + "".join(kinds).rstrip() + "\n")
    text.append(" " * margin + _axis(length, cell) + "\n")
    text.append(_legend(timeline, colour))
    text.append(f"; one character is {cell:.4g} of time\n")
    return text


def _unit(timeline: Timeline) -> float:
    """The largest unit of which all starts and ends are whole multiples; 1 if nothing takes time."""
    unit = 0.0
    for time in {round(time, 9) for time in (*timeline.start, *timeline.end)}:
        while time > 1e-6 * timeline.makespan:
            unit, time = time, unit % time if unit else 0.0
    return unit or 1.0


def _fitting(label: str, width: int) -> str:
    return label if len(label) <= width else re.sub(r"\D", "", label)[-width:]


def _style(kind: Kind, tint: int) -> Style:
    """Forwards are bright, backwards not, weight halves not and dark in writing; recomputation has no background."""
    colour = _COLOURS[tint % len(_COLOURS)]
    if kind is Kind.RECOMPUTE:
        return Style(color=colour)
    if kind is Kind.FORWARD:
        return Style(color="black", bgcolor=f"bright_{colour}")
    return Style(color="black" if kind is Kind.BACKWARD_WEIGHT else "bright_white", bgcolor=colour)


def _axis(length: int, cell: float) -> str:
    line = ""
    step = 10 if length > 20 else 5
    for place in range(0, length + 1, step):
        line = line.ljust(place) + f"{place * cell:.4g}"
    return line


def _legend(timeline: Timeline, colour: bool) -> Text:
    word, tint_of = tints(timeline.schedule)
    count = 1 + max(tint_of.values())
    shown = {o.kind for n, o in enumerate(timeline.operations) if timeline.end[n] > timeline.start[n]}
    pieces = []
    for kind, words in WORDS.items():
        if kind in shown:
            piece = Text()
            if colour:
                for tint in range(min(count, len(_COLOURS))):
                    piece.append(" " if kind is not Kind.RECOMPUTE else _RECOMPUTE, _style(kind, tint))
            else:
                piece.append(str(kind))
            pieces.append(piece.append(f" {words}"))
    if colour and count > 1:
        for tint in range(count):
            piece = Text().append(" ", _style(Kind.FORWARD, tint)).append(" ", _style(Kind.BACKWARD, tint))
            pieces.append(piece.append(f" {word} {tint}"))
    pieces.append(Text(f"{_IDLE} idle"))
    if recomputed_inside(timeline.schedule):
        pieces.append(Text(f"{_RECOMPUTE} recomputes first"))
    if has_exposed_collectives(timeline):
        pieces.append(Text(f"{_COLLECTIVES} exposed tensor-parallel collectives"))
    if any(sync.end > sync.begin for sync in timeline.syncs):
        pieces.append(Text(f"{_SYNC} idle, gradient sync runs"))
    return Text("  ").join(pieces)
