"""One row of the report's table for each plan, and the plans that no other beats in both time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median

from auto3d.runtime.measurement import Measurement, Status
from auto3d.search.axes import plan_name, schedule_of_axis
from launch.console.records import rates, recomputed
from launch.model.corrected import corrected
from launch.report.source import ReportedPlan
from launch.report.throughput import ThroughputColumns

PREDICTED = "predicted"  # the status of a plan that was not run


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """Choices and figures of one plan, in seconds and bytes; what is not known is None."""

    name: str
    engine: str
    dp: int
    tp: int
    pp: int
    micro_batch_size: int
    micro_batches: int
    schedule: str
    recompute: str
    partition: str
    placement: str
    more: str
    ranks: int
    status: str
    emulated: bool
    trials: int
    measured_s: float | None  # median over trials of the median over iterations
    spread_s: float | None  # slowest minus fastest iteration of all trials
    predicted_s: float | None
    corrected_s: float | None  # predicted_s, corrected by other plans' trials; None: it rests on a profile
    corrected_interval_s: tuple[float, float] | None  # times between which four of five measurements lie
    place_assumed: bool  # whether figures that nobody gave or measured decide its place in the search
    error: float | None  # predicted_s / measured_s - 1; None where they are not of the same devices
    # Throughput by the measured time if there is one, else by the predicted time; FLOP/s of one device.
    samples_per_s: float | None
    tokens_per_s: float | None
    model_flops_per_s_per_device: float | None  # without recomputation
    hardware_flops_per_s_per_device: float | None  # with recomputation
    mfu: float | None
    measured_peak: float | None  # fullest rank
    predicted_peak: float | None  # fullest pipeline device
    problem: str  # why a trial did not succeed


def row_of(reported: ReportedPlan, columns: ThroughputColumns) -> PlanRow:
    """The row of a plan; ``columns`` gives its throughput."""
    plan, candidate = reported.plan, reported.candidate
    good = [trial for trial in reported.measurements if trial.status is Status.OK]
    measured_s = median(trial.median_s for trial in good) if good else None
    predicted_s = None if reported.model is None else reported.model.seconds(plan)
    times = [time for trial in good for time in trial.iteration_s]
    peaks = list(chain.from_iterable(trial.peak_bytes for trial in good))
    failed = next((trial for trial in reported.measurements if trial.status is not Status.OK), None)
    return PlanRow(
        name=plan_name(plan),
        engine=plan.engine,
        dp=plan.dp,
        tp=plan.tp,
        pp=plan.pp,
        micro_batch_size=plan.micro_batch_size,
        micro_batches=plan.micro_batches,
        schedule=schedule_of_axis(plan),
        recompute=recomputed(plan),
        partition=candidate.partition if candidate else "",
        placement=candidate.placement if candidate else "",
        more=candidate.more if candidate else "",
        ranks=plan.ranks,
        status=_status(reported.measurements, failed),
        emulated=any(trial.emulated for trial in reported.measurements),
        trials=len(reported.measurements),
        measured_s=measured_s,
        spread_s=max(times) - min(times) if times else None,
        predicted_s=predicted_s,
        corrected_s=None,
        corrected_interval_s=None,
        place_assumed=reported.place_assumed,
        error=predicted_s / measured_s - 1 if predicted_s and measured_s and reported.compared else None,
        **rates(columns.of(reported, measured_s, predicted_s)),
        measured_peak=max(peaks, default=None),
        predicted_peak=None if reported.model is None else max(reported.model.memory.of(plan)),
        problem=failed.error if failed else "",
    )


def with_corrections(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """``rows`` with the predicted time of each corrected by the trials of the others."""
    right = corrected([row.predicted_s for row in rows], [row.measured_s for row in rows])
    return [
        row
        if correction is None
        else replace(row, corrected_s=correction.seconds, corrected_interval_s=correction.interval_s)
        for row, correction in zip(rows, right, strict=True)
    ]


def order(row: PlanRow) -> tuple[int, float]:
    """The key that sorts rows: measured rows by time, then predicted rows by time, then failed rows."""
    if row.measured_s is not None:
        return 0, row.measured_s
    return (1, row.predicted_s or 0.0) if row.status == PREDICTED else (2, 0.0)


def front(points: Sequence[tuple[float | None, float | None]]) -> list[int]:
    """The places in ``points`` of the Pareto front, by rising first value.

    No other point is at most as large in both values and smaller in one. Of equal points, the first is on the front;
    points with a value of None are not.
    """
    known = [(x, y, place) for place, (x, y) in enumerate(points) if x is not None and y is not None]
    places: list[int] = []
    least = float("inf")
    for _, y, place in sorted(known):
        if y < least:
            places.append(place)
            least = y
    return places


def _status(measurements: Sequence[Measurement], failed: Measurement | None) -> str:
    return str(failed.status if failed else Status.OK) if measurements else PREDICTED
