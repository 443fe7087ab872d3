"""Pipeline schedules as `auto3d schedule` asks for them, simulated, and their figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from auto3d.errors import InputError
from auto3d.schedule import SCHEDULES, build_schedule, parse_schedule
from auto3d.schedule.in_flight import peak_activations
from auto3d.schedule.weight_versions import weight_copies
from auto3d.simulate.costs import uniform
from auto3d.simulate.costs_text import write_times
from auto3d.simulate.critical_path import count, critical_path
from auto3d.simulate.idle import SteadyState, bubble_ratio, idle, idle_within, steady_state
from auto3d.simulate.simulate import Timeline, simulate

_FLAG_OF = {"sync": "--sync-placement"}  # options of schedules whose flag has another name


@dataclass(frozen=True, kw_only=True)
class ScheduleRequest:
    """What to simulate. ``options`` and ``times`` hold only what the user gave."""

    stages: int
    micro_batches: int
    tp: int = 1  # ranks of each device
    options: dict[str, int | str]  # options of the schedule
    times: dict[str, Any]  # arguments of auto3d.simulate.costs.uniform


@dataclass(frozen=True)
class ScheduleFigures:
    """Figures of a simulated schedule; the lists have one value per device."""

    schedule: str
    stages: int
    micro_batches: int
    devices: int
    makespan: float
    bubble_ratio: float
    idle: list[float]
    idle_within: list[float]
    steady_state: SteadyState | None
    peak_activations: list[float]
    weight_copies: list[float]
    critical_path: dict[str, int]  # its numbers of forwards and backwards
    operations: list[list[str]]


def timeline_of(name: str, request: ScheduleRequest) -> Timeline:
    """The simulation of the schedule called ``name``; raises InputError where it does not take an option."""
    return _timeline(name, request, request.options)


def timelines_of(names: Sequence[str], request: ScheduleRequest) -> list[Timeline]:
    """The simulations of several schedules; a name may add options, as in ``chimera:scale=doubling:pipes=4``.

    Each schedule gets the options of the request that it takes; raises InputError for an option that none takes.
    """
    asked = [parse_schedule(name, where="--compare", example="chimera:scale=doubling") for name in names]
    for option in request.options:
        if not any(option in SCHEDULES[name].options for name, _ in asked if name in SCHEDULES):
            raise InputError(f"{flag(option)}: none of {', '.join(name for name, _ in asked)} takes it")
    timelines = []
    for name, own in asked:
        shared = {o: v for o, v in request.options.items() if name in SCHEDULES and o in SCHEDULES[name].options}
        timelines.append(_timeline(name, request, shared | own))
    return timelines


def figures_of(timeline: Timeline) -> ScheduleFigures:
    schedule = timeline.schedule
    forwards, backwards = count(critical_path(timeline))
    return ScheduleFigures(
        schedule=schedule.name,
        stages=schedule.stages,
        micro_batches=schedule.micro_batches,
        devices=schedule.devices,
        makespan=timeline.makespan,
        bubble_ratio=bubble_ratio(timeline),
        idle=idle(timeline),
        idle_within=idle_within(timeline),
        steady_state=steady_state(timeline),
        peak_activations=peak_activations(schedule),
        weight_copies=weight_copies(schedule),
        critical_path={"forwards": forwards, "backwards": backwards},
        operations=[[str(operation) for operation in operations] for operations in schedule.operations],
    )


def flag(option: str) -> str:
    """The option as the command line spells it."""
    return _FLAG_OF.get(option, f"--{option.replace('_', '-')}")


def _timeline(name: str, request: ScheduleRequest, options: dict[str, int | str]) -> Timeline:
    for option in options if name in SCHEDULES else ():
        if option not in SCHEDULES[name].options:
            takes = ", ".join(map(flag, SCHEDULES[name].options))
            raise InputError(f"schedule {name}: it has no {flag(option)}; it takes {takes}")
    sizes = {"devices": request.stages, "micro_batches": request.micro_batches}
    schedule = build_schedule(name, **sizes, **options)
    costs = uniform(schedule, **request.times)
    if "times" in SCHEDULES[name].options and "times" not in options:
        schedule = build_schedule(name, **sizes, **options, times=write_times(costs))
    return simulate(schedule, costs)
