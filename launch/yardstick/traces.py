"""Traces of real trainings, operation by operation, replayed in the simulator: a test of it without a cost model.

A trace has one row per operation of one rank per pipeline stage and data-parallel copy: ``step``, ``dp_rank``,
``stage``, ``optype``, ``seq_id`` (the number among the rank's operations of that type) and ``start_ts`` and
``duration`` in seconds, as in the straggler analysis of Lin et al. (OSDI 2025). The steps are Megatron-LM's
under 1F1B without interleaving:

    params-all-gather, forward-compute and backward-compute with their sends and receives, layernorm-grads-all-reduce,
    embedding-grads-all-reduce (first and last stage), grads-reduce-scatter, optimizer-clip-main-grad, optimizer

A recorded communication includes waiting for the other ranks. Its own time is what remains once all of them have
started it: the least end less the latest start. Nothing is fitted.
"""

import csv
import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from auto3d.errors import InputError
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.straight_pipeline import alternating_orders
from auto3d.simulate.costs import uniform
from auto3d.simulate.simulate import simulate

COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "seq_id")
GATHER, LAYERNORM, EMBEDDING = "params-all-gather", "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
SCATTER, CLIP, OPTIMIZER = "grads-reduce-scatter", "optimizer-clip-main-grad", "optimizer"

Key = tuple[int, int, str, int]  # (data-parallel rank, stage, type, number among its type)


@dataclass(frozen=True)
class Interval:
    """When an operation ran, in seconds."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class TracedStep:
    """The operations of one training step on all ranks."""

    step: int
    operations: Mapping[Key, Interval]

    @property
    def begin(self) -> float:
        return min(interval.start for interval in self.operations.values())

    @property
    def seconds(self) -> float:
        """The measured time from the first start to the last end."""
        return max(interval.end for interval in self.operations.values()) - self.begin


@dataclass(frozen=True)
class Trace:
    """A traced training: ``copies`` data-parallel copies of ``stages`` stages with ``micro_batches`` per copy."""

    steps: tuple[TracedStep, ...]

    @cached_property
    def copies(self) -> int:
        return 1 + max(key[0] for key in self.steps[0].operations)

    @cached_property
    def stages(self) -> int:
        return 1 + max(key[1] for key in self.steps[0].operations)

    @cached_property
    def micro_batches(self) -> int:
        return sum(key[:3] == (0, 0, "forward-compute") for key in self.steps[0].operations)


@dataclass(frozen=True)
class Replay:
    """One step beside its replay, in seconds."""

    step: int
    predicted_s: float
    measured_s: float


def read_trace(path: Path) -> Trace:
    """The trace in a CSV file, which may be compressed with gzip. Raises InputError if it is no trace."""
    steps: dict[int, dict[Key, Interval]] = {}
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as lines:
        reader = csv.DictReader(lines)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise InputError(f"{path}: lacks the column {missing[0]}; a trace has {', '.join(COLUMNS)}")
        for row in reader:
            try:
                key = int(row["dp_rank"]), int(row["stage"]), row["optype"], int(row["seq_id"])
                start, seconds = float(row["start_ts"]), float(row["duration"])
                steps.setdefault(int(row["step"]), {})[key] = Interval(start, start + seconds)
            except ValueError as error:
                raise InputError(f"{path}, line {reader.line_num}: {error}") from None
    if not steps:
        raise InputError(f"{path}: holds no operations")
    return Trace(tuple(TracedStep(step, operations) for step, operations in sorted(steps.items())))


def replay(trace: Trace, *, unrecorded: bool = True) -> Iterator[Replay]:
    """The steps of ``trace``, each simulated from the measured times of its operations.

    ``unrecorded`` adds the time between two recorded operations in which a rank does something that has no row
    (preparing the first batch, copying gradients before the reduce-scatter): the least among the data-parallel copies
    of a stage, because the others may wait there. Without it, only recorded durations count. Raises InputError if the
    trace lacks an operation of 1F1B.
    """
    schedule = traced_schedule(trace)
    free = uniform(schedule, forward=0.0)
    for step in trace.steps:
        try:
            times = tuple(_times(trace, step, schedule, unrecorded=unrecorded))
        except KeyError as error:
            copy, stage, kind, number = error.args[0]
            raise InputError(
                f"step {step.step}: stage {stage} of copy {copy} has no {kind} {number}; a trace needs every operation "
                "of 1F1B without interleaving"
            ) from None
        timeline = simulate(schedule, replace(free, by_operation=times))
        yield Replay(step.step, timeline.makespan, step.seconds)


def traced_schedule(trace: Trace) -> Schedule:
    """A traced step as a schedule; each data-parallel copy is a pipe on devices of its own.

    A device begins with S and U, the gathering of the parameters, runs its forwards and backwards as under 1F1B, and
    ends with S and U, the reduce-scatter of the gradients and the update. Micro-batch i of copy c has the number
    c × micro-batches + i.
    """
    devices: list[tuple[Operation, ...]] = []
    device_of: dict[tuple[int, int], int] = {}
    for copy in range(trace.copies):
        for stage, order in enumerate(alternating_orders(trace.stages, trace.micro_batches)):
            device_of[stage, copy] = len(devices)
            first = copy * trace.micro_batches
            passes = (
                operation._replace(pipe=copy, micro_batches=tuple(first + number for number in operation.micro_batches))
                for operation in order
            )
            sync, update = Operation(Kind.SYNC, stage, pipe=copy), Operation(Kind.UPDATE, stage, pipe=copy)
            devices.append((sync, update, *passes, sync, update))
    return Schedule(
        name="traced-1f1b",
        stages=trace.stages,
        micro_batches=trace.copies * trace.micro_batches,
        device_of=device_of,
        operations=tuple(devices),
    )


def _times(trace: Trace, step: TracedStep, schedule: Schedule, *, unrecorded: bool) -> Iterator[tuple[float, float]]:
    """The seconds of each operation of ``schedule``, and of the message or collective that follows it."""
    ran, begin, last = step.operations, step.begin, trace.stages - 1
    copies, final = range(trace.copies), trace.micro_batches - 1
    ready = max(ran[copy, stage, CLIP, 0].start for copy in copies for stage in range(trace.stages))

    def between(copy: int, stage: int, earlier: tuple[str, int], later: str) -> float:
        """The unrecorded seconds from the end of ``earlier`` to the start of ``later``."""
        if not unrecorded:
            return 0.0
        return max(0.0, min(ran[other, stage, later, 0].start - ran[other, stage, *earlier].end for other in copies))

    for device in schedule.operations:
        copy, stage = device[0].pipe, device[0].stage
        late = ran[copy, stage, GATHER, 0].start - begin if unrecorded else 0.0
        yield late, together([ran[other, stage, GATHER, 0] for other in copies])
        yield between(copy, stage, (GATHER, 0), "forward-recv" if stage else "forward-compute"), 0.0
        for operation in device[2:-2]:
            number = operation.micro_batches[0] - copy * trace.micro_batches
            word, to = ("forward", stage + 1) if operation.kind is Kind.FORWARD else ("backward", stage - 1)
            message = 0.0
            if 0 <= to <= last:
                message = together([ran[copy, stage, f"{word}-send", number], ran[copy, to, f"{word}-recv", number]])
            yield ran[copy, stage, f"{word}-compute", number].seconds, message

        tied = stage in (0, last) and last > 0  # they sum the gradients of the embedding that they share
        seconds = between(copy, stage, ("backward-send" if stage else "backward-compute", final), LAYERNORM)
        seconds += ran[copy, stage, LAYERNORM, 0].seconds
        if tied:
            seconds += together([ran[copy, edge, EMBEDDING, 0] for edge in (0, last)])
        seconds += between(copy, stage, (EMBEDDING if tied else LAYERNORM, 0), SCATTER)
        yield seconds, together([ran[other, stage, SCATTER, 0] for other in copies])
        yield ran[copy, stage, CLIP, 0].end - ready + ran[copy, stage, OPTIMIZER, 0].seconds, 0.0


def together(ends: list[Interval]) -> float:
    """The seconds of a communication once all its ranks have started it.

    Clocks of several machines differ a little, so a difference below 0 counts as 0.
    """
    return max(0.0, min(interval.end for interval in ends) - max(interval.start for interval in ends))
