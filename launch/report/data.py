"""The content of a report, ready for JSON: rows, details of the best plans, refusals, commands."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from auto3d.errors import InputError
from auto3d.words import counted
from launch.model.corrected import WORDS
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import cluster
from launch.report.details import PlanDetail, detail_of
from launch.report.rows import PlanRow, front, order, row_of, with_corrections
from launch.report.source import ReportSource, source_of
from launch.report.throughput import ThroughputColumns

DETAILED = 20  # best plans with a timeline
DETAILED_ON_FRONT = 20  # most further plans of a Pareto front that have a timeline


@dataclass(frozen=True, kw_only=True)
class RefusedReason:
    """Candidates that cannot run for one reason."""

    count: int
    reason: str
    example: str


@dataclass(frozen=True, kw_only=True)
class NextCommand:
    """A command that the reader may want to run."""

    purpose: str
    command: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that the page shows. Sizes are bytes, times seconds."""

    recipe: str
    verb: str  # command that the numbers come from: sweep, tune or plan
    subject: str  # model, cluster and batch, in words
    written: str  # date and time, UTC
    measured: str  # how the measured numbers were made; empty if there are none
    predicted: str  # how the predicted numbers were made
    rates: str  # text about the throughput columns
    remarks: tuple[str, ...]
    rows: list[PlanRow]  # fastest first
    fronts: dict[str, list[int]]  # measured and predicted -> rows on the Pareto front of time against memory
    details: list[PlanDetail]
    refused: list[RefusedReason]
    commands: list[NextCommand]


def report_of(recipe: LoadedRecipe, tell: Callable[[int, float, bool], None] | None = None) -> Report:
    """The report of ``recipe``; ``tell`` receives the progress of a search, if there is a search."""
    source = source_of(recipe, tell)
    columns = ThroughputColumns(source.recipe)
    plans = sorted(
        ((row_of(reported, columns), reported) for reported in source.plans), key=lambda pair: order(pair[0])
    )
    rows = [row for row, _ in plans] if source.profiled else with_corrections([row for row, _ in plans])
    fronts = {
        "measured": front([(row.measured_s, row.measured_peak) for row in rows]),
        "predicted": front([(row.predicted_s, row.predicted_peak) for row in rows]),
    }
    on_front = [place for places in fronts.values() for place in places if place >= DETAILED]
    detailed = sorted({*range(min(DETAILED, len(rows))), *on_front[:DETAILED_ON_FRONT]})
    details, remarks = [], list(source.remarks)
    if any(row.corrected_s is not None for row in rows):
        remarks.append(f"{WORDS[0].upper()}{WORDS[1:]}.")
    for place in detailed:
        plan, model = plans[place][1].plan, plans[place][1].model
        if model is None:
            continue
        try:
            details.append(detail_of(place, plan, model))
        except InputError as error:
            remarks.append(f"{rows[place].name} has no timeline: {error}")
    return Report(
        recipe=source.recipe.name,
        verb=source.verb,
        subject=_subject(source.recipe),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        measured=source.measured,
        predicted=source.predicted,
        rates=columns.basis(
            measured=any(row.measured_s is not None for row in rows),
            predicted=any(row.measured_s is None and row.predicted_s is not None for row in rows),
        ),
        remarks=tuple(remarks),
        rows=rows,
        fronts=fronts,
        details=details,
        refused=[
            RefusedReason(count=refusal.count, reason=refusal.reason, example=str(refusal.example))
            for refusal in source.refused
        ],
        commands=_commands(source, saved=any(detail.plan for detail in details)),
    )


def _subject(recipe: LoadedRecipe) -> str:
    values, machine = recipe.values, cluster(recipe)
    model = values.model.architecture or values.model.factory or values.model.layers
    nodes = counted(len(machine.nodes), "node")
    described = (values.cluster, *values.cluster.more)
    kinds = " and ".join(dict.fromkeys(kind.accelerator or machine.device for kind in described))
    return (
        f"{model}; {counted(machine.devices, 'device')} in {nodes} ({kinds}); "
        f"global batch {values.training.global_batch}"
    )


def _commands(source: ReportSource, *, saved: bool) -> list[NextCommand]:
    recipe = _portable(source.recipe)
    again = {
        "sweep": "run the sweep again; finished trials are kept",
        "tune": "run the tune again; finished trials are kept",
        "plan": "search again, on the command line",
    }
    commands = [(again[source.verb], recipe.command(source.verb))]
    if source.verb == "plan":
        commands.append(("run the best plans and compare with the predictions", recipe.command("tune")))
    commands.append(("write this page again", recipe.command("report")))
    if saved:
        train = recipe.command("train", "--plan", "plan.json", without="plan")
        commands.append(("train under a plan saved from this page", train))
    return [
        NextCommand(purpose=purpose, command=shlex.join(["auto3d", *shlex.split(command)[1:]]))
        for purpose, command in commands
    ]


def _portable(recipe: LoadedRecipe) -> LoadedRecipe:
    """``recipe`` with a name that has no folder of this machine in it."""
    path = Path(recipe.written)
    if not path.is_absolute():
        return recipe
    here = Path.cwd()
    return replace(recipe, written=str(path.relative_to(here)) if path.is_relative_to(here) else path.name)
