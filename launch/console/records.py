"""Measurements -> records of a table: what each column holds, which columns a table needs, how a cell looks."""

import csv
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from auto3d.cost.throughput import IterationFlops, Throughput, throughput
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.measurement import BYTES, CommunicationCalls, Measurement, Status
from auto3d.schedule.shape import shape_of
from auto3d.search.axes import AXES, OF_PLANS, TYPES, schedule_of_axis
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import known_peak_flops

_READ: dict[str, Callable[[Plan], str]] = {
    "schedule": schedule_of_axis,
    "recompute": lambda plan: recomputed(plan),
    "replicas": lambda plan: "+".join(str(stage.replicas) for stage in plan.stages),
}
"""How a Plan shows the value of an axis, where that is no field of it."""
_HEADINGS = {name: axis.heading for name, axis in AXES.items() if axis.heading} | {"recompute": "recomputed"}
CHOICES = {"engine": "engine"} | {name: _HEADINGS[name] for name in _HEADINGS if name in OF_PLANS or name in _READ}
METHODS = {name: heading for name, heading in _HEADINGS.items() if name not in CHOICES} | {"planner": "planner"}
RATES = {
    "samples_per_s": "samples\nper s",
    "tokens_per_s": "tokens\nper s",
    "model_flops_per_s_per_device": "TFLOP/s\nper device",
    "hardware_flops_per_s_per_device": "with\nrecomputation",
    "mfu": "MFU",
}
COMMUNICATION = {
    "communicated_bytes": "communicated\n(MiB)",
    "communication_s": "communicating\n(s)",
    "why_not_logged": "why not logged",
}
HEADINGS = {
    **CHOICES,
    **METHODS,
    "iteration_s": "s per\niteration",
    "spread_s": "spread\n(s)",
    "predicted_s": "predicted\n(s)",
    "prediction_error": "error",
    "corrected_s": "corrected\n(s)",
    "corrected_interval_s": "80 %",
    "speed_up": "speed-up",
    **RATES,
    "peak_bytes": "peak\n(MiB)",
    "used_bytes": "used\n(MiB)",
    **COMMUNICATION,
    "status": "status",
    "why_not": "why not",
}
_MODEL, _HARDWARE = "model_flops_per_s_per_device", "hardware_flops_per_s_per_device"
_SHOWN = 6  # rows that an error names at most


def record(
    recipe: LoadedRecipe,
    measurement: Measurement,
    predicted_s: float | None = None,
    candidate: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The record of one trial, in seconds, bytes and FLOPs; figures of a trial that is not ok are None.

    The columns of METHODS come from the plan's ``candidate``: a Plan does not record how it was made.
    """
    plan = measurement.plan
    ok = measurement.status is Status.OK
    seconds = measurement.median_s if ok else None
    return {
        **{name: _READ[name](plan) if name in _READ else getattr(plan, name) for name in CHOICES},
        **{name: (candidate or {}).get(name) for name in METHODS},
        "iteration_s": seconds,
        "spread_s": measurement.spread_s if ok else None,
        "predicted_s": predicted_s,
        "prediction_error": None if seconds is None or predicted_s is None else predicted_s / seconds - 1,
        "corrected_s": None,
        "corrected_interval_s": None,
        "speed_up": None,
        **rates(None if seconds is None else rates_of(recipe, measurement, seconds)),
        **{name: max(getattr(measurement, name), default=None) if ok else None for name in BYTES},
        **communication(measurement),
        "status": str(measurement.status),
        "why_not": measurement.error if measurement.status is Status.INFEASIBLE else None,
        "devices": "emulated" if measurement.emulated else "real",
        "error": measurement.error,
        "plan": asdict(plan),
    }


def communication(measurement: Measurement) -> dict[str, Any]:
    """The columns of COMMUNICATION: per iteration, of the rank that has most; a message counts where it is sent."""
    ranks = measurement.communication
    sent = [sum(calls.message_bytes for calls in rank if not _receives(calls)) for rank in ranks]
    seconds = [sum(calls.seconds for calls in rank) for rank in ranks]
    return {
        "communicated_bytes": max(sent, default=None),
        "communication_s": max(seconds, default=None),
        "why_not_logged": measurement.why_not_logged or None,
    }


def _receives(calls: CommunicationCalls) -> bool:
    return calls.operation in ("recv", "irecv")


def rates_of(recipe: LoadedRecipe, measurement: Measurement, seconds: float) -> Throughput:
    """The throughput of the measured plan at ``seconds`` per iteration.

    Emulated devices have no peak: the accelerator that the recipe names has other times.
    """
    flops = peak = None
    if measurement.model_flops is not None:
        flops = IterationFlops(model=measurement.model_flops, recomputed=measurement.recomputed_flops or 0.0)
    if not measurement.emulated:
        peak = known_peak_flops(recipe, measurement.plan, measured_precision(recipe))
    return throughput(
        measurement.plan, seconds, flops=flops, tokens_per_sample=measurement.tokens_per_sample, peak_flops=peak
    )


def rates(of: Throughput | None) -> dict[str, float | None]:
    """The columns of RATES."""
    if of is None:
        return dict.fromkeys(RATES)
    figures = (of.samples_per_s, of.tokens_per_s, of.model_flops_per_s, of.hardware_flops_per_s, of.mfu)
    return dict(zip(RATES, figures, strict=True))


def measured_precision(recipe: LoadedRecipe) -> str:
    """The precision of matrix products in a trial, as in an accelerator's ``peak_tflops``."""
    training = recipe.values.training
    return "tf32" if training.tf32 and training.precision == "float32" else training.precision


def compare(records: Sequence[dict[str, Any]], baseline: str) -> None:
    """Fill the column ``speed_up`` of all records: the baseline's seconds per iteration by theirs.

    ``baseline`` has pairs key=value of the columns of CHOICES and METHODS, such as ``dp=1 tp=1 pp=1``. Raises
    InputError unless they match exactly one row, whose trial succeeded.
    """
    seconds = _baseline(records, baseline)["iteration_s"]
    for row in records:
        if row["iteration_s"] is not None:
            row["speed_up"] = seconds / row["iteration_s"]


def _baseline(records: Sequence[dict[str, Any]], text: str) -> dict[str, Any]:
    wanted: dict[str, str] = {}
    for pair in text.split():
        key, sign, value = pair.partition("=")
        if not sign or key not in {**CHOICES, **METHODS}:
            raise InputError(f"--baseline: {pair!r}: write KEY=VALUE with a key of {', '.join([*CHOICES, *METHODS])}")
        wanted[key] = value
    matching = [row for row in records if all(_text(row[key]) == value for key, value in wanted.items())]
    if len(matching) != 1:
        names = _names(matching or records)
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        if matching:
            raise InputError(f"--baseline: {len(matching)} rows match {text!r}; add what one of them has: {shown}")
        raise InputError(f"--baseline: no row matches {text!r}; the rows are: {shown}")
    if matching[0]["iteration_s"] is None:
        raise InputError(f"--baseline: the trial of {text!r} is {matching[0]['status']}; name a row that is ok")
    return matching[0]


def _names(records: Sequence[dict[str, Any]]) -> list[str]:
    """The records by the pairs in which they differ, of columns that a table shows."""
    shown = [key for key in columns_of(records) if key in {**CHOICES, **METHODS}]
    keys = [key for key in shown if len({row[key] for row in records}) > 1] or shown
    return [" ".join(f"{key}={_text(row[key])}" for key in keys) for row in records]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def recomputed(plan: Plan) -> str:
    """The fraction of all operations that are recomputed."""
    stages = [plan.stages[stage] for stage in shape_of(plan).recompute]
    again = sum(_count(stage.operations) - _count(stage.kept) for stage in stages)
    return f"{again / sum(_count(stage.operations) for stage in plan.stages):.0%}" if again else "none"


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(last - first for first, last in ranges)


def rate_columns(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name -> heading of the columns of RATES that hold something; FLOPs with recomputation only if a row has any."""
    columns = {name: heading for name, heading in RATES.items() if any(row[name] is not None for row in records)}
    if all(row[_HARDWARE] == row[_MODEL] for row in records):
        columns.pop(_HARDWARE, None)
    return columns


def what_rates_are(columns: Collection[str], recipe: LoadedRecipe) -> str:
    """What the columns of RATES hold, for a caption; begins with a semicolon unless it is empty."""
    text = ""
    if _MODEL in columns:
        text += "; TFLOP/s of the forward and the backward that the model needs, counted on its captured graph"
    if _HARDWARE in columns:
        text += ", then with what is recomputed"
    if "mfu" in columns:
        text += f"; MFU: without what is recomputed, of the {measured_precision(recipe)} peak of the devices"
    return text


def columns_of(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Name -> heading of the columns in which trials of this table can differ, and that are not empty."""
    columns = dict(HEADINGS)
    empty = {
        name: all(row[name] == AXES[name].default for row in records) for name in CHOICES if AXES[name].label is None
    }
    empty |= {
        "why_not": not any(row["why_not"] for row in records),
        "recompute": all(row["recompute"] == "none" for row in records),  # true in most sweeps
        "replicas": all(set(row["replicas"]) <= {"1", "+"} for row in records),
        **{name: len({row[name] for row in records}) < 2 for name in METHODS},
        **{name: name not in rate_columns(records) for name in RATES},
    }
    # CPUs do not report used_bytes.
    corrections = "corrected_s", "corrected_interval_s"
    for name in ("predicted_s", "prediction_error", *corrections, "speed_up", "used_bytes", *COMMUNICATION):
        empty[name] = all(row[name] is None for row in records)
    for name in (name for name, is_empty in empty.items() if is_empty):
        del columns[name]
    if any(row["devices"] == "emulated" for row in records):
        columns["devices"] = "devices"  # every row names its devices
    return columns


def same_choices(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Column of CHOICES -> its value, where this is the same in all of several records."""
    if len(records) < 2:
        return {}
    return {key: records[0][key] for key in CHOICES if all(row[key] == records[0][key] for row in records)}


def cells(record: Mapping[str, Any], columns: Collection[str]) -> list[str]:
    """The cells of a record, rounded for reading."""
    forms = {
        "iteration_s": "{:.3f}",
        "spread_s": "{:.3f}",
        "predicted_s": "{:.3f}",
        "prediction_error": "{:+.1%}",
        "corrected_s": "{:.3f}",
        "corrected_interval_s": "{0[0]:.3f} to {0[1]:.3f}",
        "speed_up": "{:.2f}",
        "samples_per_s": "{:.1f}",
        "tokens_per_s": "{:,.0f}",
        _MODEL: "{:.3g}",
        _HARDWARE: "{:.3g}",
        "mfu": "{:.1%}",
        "communicated_bytes": "{:.2f}",
        "communication_s": "{:.3f}",
        **dict.fromkeys(BYTES, "{:.0f}"),
    }
    units = dict.fromkeys((*BYTES, "communicated_bytes"), 2**20) | {_MODEL: 1e12, _HARDWARE: 1e12}
    in_units = {name: record[name] / unit for name, unit in units.items() if record.get(name) is not None}
    shown = {**record, **in_units}
    return ["-" if shown[name] is None else forms.get(name, "{}").format(shown[name]) for name in columns]


def csv_text(records: Sequence[Mapping[str, Any]], columns: Collection[str]) -> str:
    """The ``columns`` of all records as a CSV file with a heading."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(columns), lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def aligned(columns: Collection[str]) -> list[str]:
    """The alignment of each column: text to the left, numbers to the right."""
    texts = [name for name in OF_PLANS if TYPES[name] is str]
    left = (*texts, "why_not_logged", "status", "why_not", "devices")
    return ["left" if name in left else "right" for name in columns]
