"""What a tune prints and writes: predicted beside measured times, and how certain the order is."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from tabulate import tabulate

from auto3d.runtime.measurement import Status
from auto3d.search.certainty import CERTAIN, compare_plans
from auto3d.search.search import Search
from launch.console.ranking import HEADINGS, cells
from launch.console.records import RATES, csv_text, rate_columns, rates, rates_of, what_rates_are
from launch.console.records import cells as record_cells
from launch.console.tables import TABLES
from launch.drivers.tune import TriedPlan, fastest
from launch.model.assumed import assumed_lines
from launch.model.ranking import describe_certificate, fastest_order, predicted_on
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import most_trials
from launch.store.files import write_whole


def table(recipe: LoadedRecipe, tried: Sequence[TriedPlan], form: str) -> str:
    """Predicted beside measured times, with the throughput, the fastest plan first."""
    rows = []
    ordered = _fastest_first(tried)
    throughputs = [_rates(recipe, plan) for plan in ordered]
    columns = rate_columns(throughputs)
    for plan, throughput in zip(ordered, throughputs, strict=True):
        measured = f"{plan.seconds:.4g}" if plan.times else "-"
        error = f"{plan.error:+.1%}" if plan.times else "-"
        _, *choices = cells(plan.ranked)
        times = (f"{plan.ranked.seconds:.4g}", f"{plan.predicted_s:.4g}", measured, len(plan.times), error)
        rows.append((*times, *choices, *record_cells(throughput, columns), _status(plan)))
    headings = ["cost\nmodel (s)", *HEADINGS[:1], "measured\n(s)", "trials", "error", *HEADINGS[1:]]
    headings += [*columns.values(), "status"]
    if form == "github":
        headings = [heading.replace("-\n", "-").replace("\n", " ") for heading in headings]
    return tabulate(rows, headings, tablefmt=form, disable_numparse=True)


def _csv(recipe: LoadedRecipe, tried: Sequence[TriedPlan]) -> str:
    """The table as CSV, in seconds and FLOPs."""
    records = [
        {
            "cost_model_s": plan.ranked.seconds,
            "predicted_s": plan.predicted_s,
            "measured_s": plan.seconds if plan.times else None,
            "trials": len(plan.times),
            "prediction_error": plan.error,
            **asdict(plan.ranked.candidate),
            **_rates(recipe, plan),
            "status": _status(plan),
        }
        for plan in _fastest_first(tried)
    ]
    empty = RATES.keys() - rate_columns(records).keys()
    known = {
        name: None for record in records for name, value in record.items() if value is not None and name not in empty
    }
    return csv_text(records, known)


def _fastest_first(tried: Sequence[TriedPlan]) -> list[TriedPlan]:
    return sorted(tried, key=lambda plan: (not plan.times, plan.seconds if plan.times else 0.0))


def _status(plan: TriedPlan) -> Status:
    """The status of the first of the plan's trials that did not succeed, if there is one."""
    return next((trial.status for trial in plan.measurements if trial.status is not Status.OK), Status.OK)


def _rates(recipe: LoadedRecipe, plan: TriedPlan) -> dict[str, float | None]:
    """The throughput at the median time of the plan's successful trials; None if there are none."""
    good = [measurement for measurement in plan.measurements if measurement.status is Status.OK]
    return rates(rates_of(recipe, good[0], plan.seconds) if good else None)


def summary(recipe: LoadedRecipe, search: Search, tried: Sequence[TriedPlan]) -> str:
    """How certain the order is, and how well the cost model predicted the times before and after its correction."""
    good = [plan for plan in tried if plan.times]
    if not good:
        return "no trial succeeded"
    errors = [(plan.ranked.seconds / time - 1, plan.predicted_s / time - 1) for plan in good for time in plan.times]
    columns = rate_columns([_rates(recipe, plan) for plan in good])
    assumed = "".join(f"\n{line}" for line in assumed_lines(recipe, search.maker.model.measured_in))
    before, after = (mean(map(abs, column)) for column in zip(*errors, strict=True))
    return (
        f"{order(recipe, good)}.\n"
        f"mean error of {len(errors)} trials: {before:.1%} by the cost model alone, {after:.1%} by what was predicted "
        "before each plan's first trial, when the earlier ones had corrected it; measured: the "
        f"median over a plan's trials of the median over its iterations{what_rates_are(columns, recipe)}. "
        f"{predicted_on(recipe, search)}{assumed}{_certified(search, good)}"
    )


def _certified(search: Search, good: Sequence[TriedPlan]) -> str:
    """A line with the certificate of the fastest plan with a synthesized order; empty if there is no such plan."""
    order = fastest_order(plan.ranked for plan in _fastest_first(good))
    return "" if order is None else f"\norder of {order.candidate}: {describe_certificate(search, order)}"


def order(recipe: LoadedRecipe, good: Sequence[TriedPlan]) -> str:
    """How certain it is that the fastest of these plans is the fastest, and which plan is its closest rival."""
    if len(good) == 1:
        return "only one plan ran successfully, so there is no order"
    verdict = compare_plans([plan.times for plan in good])
    best = good[verdict.fastest]
    more = f"more trials: search.trials={2 * most_trials(recipe.values)}"
    if all(len(plan.times) == 1 for plan in good):
        return f"each plan was tried once, so it is not known how certain their order is; {more}"
    rival = good[max(range(len(good)), key=lambda place: (verdict.doubts[place], -good[place].seconds))]
    against = f"{rival.ranked.candidate}: {rival.seconds:.4g} s, {rival.seconds / best.seconds - 1:+.1%}"
    if verdict.certainty >= CERTAIN:
        return f"the fastest is certain to {verdict.certainty:.1%}; the next: {against}"
    doubt = max(verdict.doubts)
    return f"the fastest is not certain: with probability {doubt:.0%} another is faster ({against}); {more}"


def write(recipe: LoadedRecipe, tried: Sequence[TriedPlan], summary: str) -> list[Path]:
    """Write tune.md, tune.csv and, if a trial succeeded, best_plan.json to tables/<recipe>; returns the files.

    ``summary`` stands below the table.
    """
    folder = TABLES / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    text = f"{table(recipe, tried, 'github')}\n\n{summary}\n\nAgain: `{recipe.command('tune')}`\n"
    contents = {"tune.md": text, "tune.csv": _csv(recipe, tried)}
    if best := fastest(tried):
        contents["best_plan.json"] = best.ranked.plan.to_json() + "\n"
    for name, content in contents.items():
        write_whole(folder / name, content)
    return [folder / name for name in contents]
