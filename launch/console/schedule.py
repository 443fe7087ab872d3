"""`auto3d schedule`: prints and draws simulated pipeline schedules."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from tabulate import tabulate

from auto3d.schedule import SCHEDULES
from auto3d.schedule.order_file import order_file
from auto3d.schedule.order_text import without_order
from auto3d.simulate.draw_svg import draw_svg
from auto3d.simulate.draw_terminal import draw_terminal
from auto3d.simulate.pipelining_csv import pipelining_csv
from auto3d.simulate.simulate import Timeline
from auto3d.simulate.trace import trace
from auto3d.words import counted
from launch.console.output import print_json, write_text
from launch.model.simulated_schedule import (
    ScheduleFigures,
    ScheduleRequest,
    figures_of,
    flag,
    timeline_of,
    timelines_of,
)


def print_families(as_json: bool) -> None:
    """Print all schedules: names, summaries, sources, other systems that have them, options with their defaults."""
    if as_json:
        keys = ("name", "summary", "source", "ships_in", "options")
        print_json([{key: getattr(family, key) for key in keys} for family in SCHEDULES.values()])
        return
    for family in SCHEDULES.values():
        options = "  ".join(f"{flag(name)} {default}" for name, default in without_order(family.options).items())
        options = f"--load FILE  {options}" if family.explicit else options
        print(f"{family.name}\n    {family.summary}\n    proposed by {family.source}")
        if family.ships_in:
            print(f"    ships in {', '.join(family.ships_in)}")
        print(f"    {options}")


def print_schedule(
    name: str, request: ScheduleRequest, out: Console, *, as_json: bool, files: dict[str, str | None]
) -> None:
    """Draw one schedule, print its figures, and write ``files``: format (save, svg, trace, csv) -> path."""
    timeline = timeline_of(name, request)
    made_by = f"auto3d schedule {name}. {_assumptions(request, timeline)}"
    written = write_files(timeline, files, tp=request.tp, made_by=made_by)
    figures = figures_of(timeline)
    if as_json:
        print_json(asdict(figures))
        return
    out.print(draw_terminal(timeline, width=out.width, colour=bool(out.color_system) and not out.no_color))
    print(_table(figures))
    print(f"\n{_assumptions(request, timeline)}")
    if written:
        print(f"written: {', '.join(written)}")


def write_files(timeline: Timeline, files: dict[str, str | None], *, tp: int = 1, made_by: str) -> list[str]:
    """Write ``timeline`` to ``files``: format -> path or None; returns the paths.

    The formats are save, svg, trace and csv. ``made_by`` is a line of a saved file.
    """
    texts = {
        "save": lambda: order_file(timeline.schedule, made_by=made_by).to_json(),
        "svg": lambda: draw_svg(timeline, tp=tp),
        "trace": lambda: json.dumps(trace(timeline, tp=tp)),
        "csv": lambda: pipelining_csv(timeline.schedule),
    }
    written = [(path, texts[form]()) for form, path in files.items() if path]
    for path, text in written:
        write_text(path, text)
    return [path for path, _ in written]


def print_comparison(names: Sequence[str], request: ScheduleRequest, *, as_json: bool) -> None:
    """Print one row per name; a name may bring its own options, as in ``chimera:scale=doubling:pipes=4``."""
    timelines = timelines_of(names, request)
    figures = [figures_of(timeline) for timeline in timelines]
    if as_json:
        print_json([asdict(figure) for figure in figures])
        return
    headings = ["schedule", "makespan", "bubble\nratio", "weight\ncopies", "activations\nin flight"]
    rows = [[name, *_row(figure)] for name, figure in zip(names, figures, strict=True)]
    print(tabulate(rows, headings, colalign=["left", *["right"] * 4], disable_numparse=True))
    print(f"\n{_assumptions(request, timelines[0])}")
    if any(figure.steady_state for figure in figures):
        print("* asynchronous: one iteration in the steady state, without warm-up and drain")


def _table(figures: ScheduleFigures) -> str:
    columns = (figures.idle, figures.idle_within, figures.peak_activations, figures.weight_copies)
    rows = [[f"P{device}", *(f"{column[device]:.4g}" for column in columns)] for device in range(figures.devices)]
    headings = [
        "device",
        "idle",
        "idle from its first\nto its last operation",
        "activations\nin flight",
        "weight\ncopies",
    ]
    path = figures.critical_path
    lines = [
        tabulate(rows, headings, colalign=["left", *["right"] * len(columns)], disable_numparse=True),
        "",
        f"makespan {figures.makespan:.6g}, bubble ratio {figures.bubble_ratio:.4f} = idle / (devices × makespan)",
        f"critical path: {counted(path['forwards'], 'forward')}, {counted(path['backwards'], 'backward')}",
    ]
    if steady := figures.steady_state:
        lines.append(f"steady state: {steady.iteration_time:.6g} per iteration, bubble ratio {steady.bubble_ratio:.4f}")
    return "\n".join(lines)


def _row(figures: ScheduleFigures) -> list[str]:
    makespan, ratio = f"{figures.makespan:.6g}", f"{figures.bubble_ratio:.4f}"
    if steady := figures.steady_state:
        makespan, ratio = f"{steady.iteration_time:.6g}*", f"{steady.bubble_ratio:.4f}*"
    return [makespan, ratio, _range(figures.weight_copies), _range(figures.peak_activations)]


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low} to {high}"


def _assumptions(request: ScheduleRequest, timeline: Timeline) -> str:
    """The line under every figure: it is simulated, for these sizes and times."""
    costs, per_device = timeline.costs, timeline.schedule.stages / timeline.schedule.devices
    times = {
        "forward": costs.forward[0] * per_device,
        "backward": costs.backward[0] * per_device,
        "backward-input": costs.backward_input[0] * per_device,
        "backward-weight": costs.backward_weight[0] * per_device,
        "recompute": costs.recompute[0] * per_device,
        **({"exposed collectives": request.times.get("collectives", 0.0)} if request.tp > 1 else {}),
        "p2p": request.times.get("p2p", 0.0),
        "sync": costs.sync[0] * per_device,
    }
    return (
        f"Simulated, not measured: {counted(request.stages, 'device')}"
        f"{f' of tp = {request.tp} ranks' if request.tp > 1 else ''}, "
        f"{counted(request.micro_batches, 'micro-batch', 'micro-batches')}; times of all stages of one device: "
        f"{', '.join(f'{name} {time:.4g}' for name, time in times.items())}."
    )
