"""What a report says about one plan: the parts of its time, its timeline, and the memory of its devices over time.

A timeline may have a hundred thousand operations. A report draws at most ``DEVICES`` devices and ``OPERATIONS``
operations of a plan, and says how many of how many operations it shows.
"""

from dataclasses import dataclass, fields

from auto3d.cost.estimate import Estimate
from auto3d.cost.model import CostModel
from auto3d.plan import Plan
from auto3d.schedule.operation import Kind
from auto3d.simulate.cells import exposed_collectives, micro_batch_label
from auto3d.simulate.memory_timeline import BytesOverTime
from auto3d.simulate.simulate import Timeline
from auto3d.simulate.work import recomputed_inside

DEVICES = 16  # most pipeline devices that a timeline shows
OPERATIONS = 3000  # most operations that a timeline shows
PLAN_CHARACTERS = 100_000  # size of the largest plan, as JSON, that a report includes


@dataclass(frozen=True, kw_only=True)
class TimelineOperations:
    """The operations of a timeline as columns with one value per operation; times in seconds."""

    device: list[int]
    start: list[float]
    duration: list[float]
    kind: list[str]  # values of Kind
    stage: list[int]
    pipe: list[int]
    micro_batch: list[int]  # number of the first micro-batch; -1 for an update or a sync
    label: list[str]  # numbers of all its micro-batches
    exposed: list[float]  # part of the duration in which tensor-parallel collectives are not hidden


@dataclass(frozen=True, kw_only=True)
class DrawnSync:
    """One gradient all-reduce on one device, in seconds."""

    device: int
    stage: int
    start: float
    duration: float


@dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """Bytes of a pipeline device over time; ``held[i]`` holds from ``times[i]`` on."""

    device: int
    times: list[float]
    held: list[float]


@dataclass(frozen=True, kw_only=True)
class PlanDetail:
    """The simulation of one plan, in seconds and bytes."""

    row: int  # place of the plan in the table
    parts: dict[str, float]  # parts of the predicted seconds, as Estimate names them
    makespan: float  # length of the timeline
    iterations: int  # iterations that the timeline shows: several where they overlap
    devices: list[int]  # pipeline devices that are drawn
    total_devices: int
    total_operations: int
    gap: tuple[float, float] | None  # seconds between which operations are not drawn
    operations: TimelineOperations
    syncs: list[DrawnSync]
    memory: list[MemoryCurve]
    peaks: list[float]  # predicted peak bytes of every pipeline device
    capacity: list[float | None]  # bytes that a process may fill on each pipeline device; None: not known
    plan: str  # the plan as JSON; empty if it cannot run unchanged, or is too large


def detail_of(row: int, plan: Plan, model: CostModel) -> PlanDetail:
    """The detail of ``plan``, which stands in row number ``row``, by the cost model ``model``."""
    estimate, timeline = model.estimate(plan), model.timeline(plan)
    devices = _drawn_devices(timeline.schedule.devices)
    numbers, gap = _drawn_operations(timeline, devices)
    curves = model.memory.over_time(plan, timeline, devices)
    text = plan.to_json()
    return PlanDetail(
        row=row,
        parts=_parts(estimate),
        makespan=timeline.makespan,
        iterations=timeline.schedule.iterations,
        devices=devices,
        total_devices=timeline.schedule.devices,
        total_operations=sum(_has_cell(timeline, number) for number in range(len(timeline.operations))),
        gap=gap,
        operations=_columns(timeline, numbers),
        syncs=[
            DrawnSync(device=device, stage=sync.stage, start=sync.begin, duration=sync.end - sync.begin)
            for sync in timeline.syncs
            for device in sync.started
            if sync.end > sync.begin and device in devices
        ],
        memory=[_curve(device, curve, timeline.makespan, gap) for device, curve in zip(devices, curves, strict=True)],
        peaks=list(estimate.memory),
        capacity=[model.cluster.memory_of(mesh.ranks) for mesh in plan.meshes],
        plan=text if plan.graph and len(text) <= PLAN_CHARACTERS else "",
    )


def _parts(estimate: Estimate) -> dict[str, float]:
    names = [item.name for item in fields(estimate) if item.name not in ("seconds", "memory")]
    return {name: getattr(estimate, name) for name in names}


def _drawn_devices(count: int) -> list[int]:
    """At most DEVICES of ``count`` devices, evenly spaced, with the first and the last."""
    if count <= DEVICES:
        return list(range(count))
    return [round(place * (count - 1) / (DEVICES - 1)) for place in range(DEVICES)]


def _drawn_operations(timeline: Timeline, devices: list[int]) -> tuple[list[int], tuple[float, float] | None]:
    """The numbers of the operations to draw, by start, and the seconds between which some are left out."""
    numbers = [number for device in devices for number in timeline.numbers(device) if _has_cell(timeline, number)]
    numbers.sort(key=lambda number: (timeline.start[number], number))
    if len(numbers) <= OPERATIONS:
        return numbers, None
    half = OPERATIONS // 2
    gap = timeline.start[numbers[half]], timeline.start[numbers[-half]]
    return numbers[:half] + numbers[-half:], gap


def _has_cell(timeline: Timeline, number: int) -> bool:
    """Whether a timeline has a cell for the operation: not for a sync that takes its device no time to start."""
    return timeline.operations[number].kind is not Kind.SYNC or timeline.end[number] > timeline.start[number]


def _columns(timeline: Timeline, numbers: list[int]) -> TimelineOperations:
    inside = recomputed_inside(timeline.schedule)
    operations = [timeline.operations[number] for number in numbers]
    return TimelineOperations(
        device=[timeline.device_of(operation) for operation in operations],
        start=[timeline.start[number] for number in numbers],
        duration=[timeline.end[number] - timeline.start[number] for number in numbers],
        kind=[str(operation.kind) for operation in operations],
        stage=[operation.stage for operation in operations],
        pipe=[operation.pipe for operation in operations],
        micro_batch=[
            operation.micro_batches[0] // timeline.schedule.parts if operation.micro_batches else -1
            for operation in operations
        ],
        label=[micro_batch_label(timeline.schedule, operation) for operation in operations],
        exposed=[exposed_collectives(timeline, number, recomputes=number in inside) for number in numbers],
    )


def _curve(device: int, curve: BytesOverTime, end: float, gap: tuple[float, float] | None) -> MemoryCurve:
    points = [*zip(curve.times, curve.held, strict=True), (end, curve.held[-1])]
    following = [*points[1:], (float("inf"), 0.0)]
    points = [  # without what is freed and allocated again in the same moment; a peak is never left out
        (time, size)
        for (time, size), (then, next_size) in zip(points, following, strict=True)
        if not (time == then and size <= next_size) and (gap is None or not gap[0] < time < gap[1])
    ]
    return MemoryCurve(device=device, times=[time for time, _ in points], held=[size for _, size in points])
