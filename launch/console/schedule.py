"""`auto3d schedule`: describe, simulate, compare and draw pipeline schedules."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from tabulate import tabulate

from auto3d.errors import InputError
from auto3d.schedule import SCHEDULES, build_schedule, parse_schedule
from auto3d.schedule.in_flight import peak_activations
from auto3d.schedule.weight_versions import weight_copies
from auto3d.simulate.costs import uniform
from auto3d.simulate.critical_path import count, critical_path
from auto3d.simulate.draw_svg import draw_svg
from auto3d.simulate.draw_terminal import draw_terminal
from auto3d.simulate.idle import bubble_ratio, idle, idle_within, steady_state
from auto3d.simulate.pipelining_csv import pipelining_csv
from auto3d.simulate.simulate import Timeline, simulate
from auto3d.simulate.trace import trace
from launch.console.output import print_json, write_text

_OPTION_NAMES = {"sync": "--sync-placement"}  # of the command, where it is not the family's own


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for. ``options`` and ``times`` hold only what was given."""

    stages: int
    micro_batches: int
    options: dict[str, int | str]  # of families
    times: dict[str, float]  # of auto3d.simulate.costs.uniform


def print_families(as_json: bool) -> None:
    """All schedules: names, summaries, options with their defaults."""
    if as_json:
        print_json([{"name": f.name, "summary": f.summary, "options": f.options} for f in SCHEDULES.values()])
        return
    for family in SCHEDULES.values():
        options = "  ".join(f"{_flag(name)} {default}" for name, default in family.options.items())
        print(f"{family.name}\n    {family.summary}\n    {options}")


def print_schedule(name: str, request: Request, out: Console, *, as_json: bool, files: dict[str, str | None]) -> None:
    """Draw one schedule, print its figures, and write ``files``: format (svg, trace, csv) -> path."""
    timeline = _timeline(name, request, request.options)
    texts = {
        "svg": lambda: draw_svg(timeline),
        "trace": lambda: json.dumps(trace(timeline)),
        "csv": lambda: pipelining_csv(timeline.schedule),
    }
    written = [(path, texts[form]()) for form, path in files.items() if path]
    for path, text in written:
        write_text(path, text)
    record = _record(timeline)
    if as_json:
        print_json(record)
        return
    out.print(draw_terminal(timeline, width=out.width, colour=bool(out.color_system) and not out.no_color))
    print(_figures(record))
    print(f"\n{_told(request, timeline)}")
    if written:
        print(f"written: {', '.join(path for path, _ in written)}")


def print_comparison(names: Sequence[str], request: Request, *, as_json: bool) -> None:
    """One row per name; a name may bring options of its own, as in ``chimera:scale=doubling:pipes=4``."""
    asked = [parse_schedule(name, where="--compare", example="chimera:scale=doubling") for name in names]
    for option in request.options:
        if not any(option in SCHEDULES[name].options for name, _ in asked if name in SCHEDULES):
            raise InputError(f"{_flag(option)}: none of {', '.join(name for name, _ in asked)} takes it")
    timelines = []
    for name, own in asked:
        shared = {o: v for o, v in request.options.items() if name in SCHEDULES and o in SCHEDULES[name].options}
        timelines.append(_timeline(name, request, shared | own))
    records = [_record(timeline) for timeline in timelines]
    if as_json:
        print_json(records)
        return
    headings = ["schedule", "makespan", "bubble\nratio", "weight\ncopies", "activations\nin flight"]
    rows = [[name, *_row(record)] for name, record in zip(names, records, strict=True)]
    print(tabulate(rows, headings, colalign=["left", *["right"] * 4], disable_numparse=True))
    print(f"\n{_told(request, timelines[0])}")
    if any(record["steady_state"] for record in records):
        print("* asynchronous: of one iteration in the steady state, without warm-up and drain")


def _timeline(name: str, request: Request, options: dict[str, int | str]) -> Timeline:
    for option in options if name in SCHEDULES else ():
        if option not in SCHEDULES[name].options:
            takes = ", ".join(map(_flag, SCHEDULES[name].options))
            raise InputError(f"schedule {name}: it has no {_flag(option)}; it takes {takes}")
    schedule = build_schedule(name, devices=request.stages, micro_batches=request.micro_batches, **options)
    return simulate(schedule, uniform(schedule, **request.times))


def _record(timeline: Timeline) -> dict[str, Any]:
    """The figures as --json prints them; lists are per device."""
    schedule = timeline.schedule
    forwards, backwards = count(critical_path(timeline))
    steady = steady_state(timeline)
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "devices": schedule.devices,
        "makespan": timeline.makespan,
        "bubble_ratio": bubble_ratio(timeline),
        "idle": idle(timeline),
        "idle_within": idle_within(timeline),
        "steady_state": asdict(steady) if steady else None,
        "peak_activations": peak_activations(schedule),
        "weight_copies": weight_copies(schedule),
        "critical_path": {"forwards": forwards, "backwards": backwards},
        "operations": [[str(operation) for operation in operations] for operations in schedule.operations],
    }


def _figures(record: dict[str, Any]) -> str:
    lists = ("idle", "idle_within", "peak_activations", "weight_copies")
    rows = [[f"P{device}", *(f"{record[name][device]:.4g}" for name in lists)] for device in range(record["devices"])]
    headings = [
        "device",
        "idle",
        "idle from its first\nto its last operation",
        "activations\nin flight",
        "weight\ncopies",
    ]
    path = record["critical_path"]
    lines = [
        tabulate(rows, headings, colalign=["left", *["right"] * len(lists)], disable_numparse=True),
        "",
        f"makespan {record['makespan']:.6g}, bubble ratio {record['bubble_ratio']:.4f} = idle / (devices × makespan)",
        f"critical path: {path['forwards']} forwards, {path['backwards']} backwards",
    ]
    if steady := record["steady_state"]:
        lines.append(
            f"steady state: {steady['iteration_time']:.6g} per iteration, bubble ratio {steady['bubble_ratio']:.4f}"
        )
    return "\n".join(lines)


def _row(record: dict[str, Any]) -> list[str]:
    steady = record["steady_state"]
    makespan, ratio = (
        (f"{steady['iteration_time']:.6g}*", f"{steady['bubble_ratio']:.4f}*")
        if steady
        else (f"{record['makespan']:.6g}", f"{record['bubble_ratio']:.4f}")
    )
    return [makespan, ratio, _range(record["weight_copies"]), _range(record["peak_activations"])]


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low} to {high}"


def _told(request: Request, timeline: Timeline) -> str:
    """Under every figure: that it is simulated, and on what times."""
    costs, share = timeline.costs, timeline.schedule.devices / timeline.schedule.stages
    times = {
        "forward": costs.forward[0] / share,
        "backward": costs.backward[0] / share,
        "backward-input": costs.backward_input[0] / share,
        "backward-weight": costs.backward_weight[0] / share,
        "recompute": costs.recompute[0] / share,
        "p2p": request.times.get("p2p", 0.0),
        "sync": costs.sync[0] / share,
    }
    return (
        f"Simulated, not measured: {request.stages} devices, {request.micro_batches} micro-batches; times of one "
        f"device's whole share of the model: {', '.join(f'{name} {time:.4g}' for name, time in times.items())}."
    )


def _flag(option: str) -> str:
    return _OPTION_NAMES.get(option, f"--{option.replace('_', '-')}")
