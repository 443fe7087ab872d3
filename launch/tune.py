"""`auto3d tune`: search, then the best candidates by real trials, which correct the cost model on the way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from tabulate import tabulate

from auto3d.cost.model import Estimate
from auto3d.errors import InputError
from auto3d.runtime.measurement import Measurement, Status
from auto3d.search.correction import correct
from auto3d.search.search import Ranked, Search
from launch.candidates import exact_plan
from launch.capture import Elsewhere
from launch.check_capture import check_plans
from launch.files import write_whole
from launch.plan import HEADINGS, cells
from launch.recipe import LoadedRecipe
from launch.search import cannot_run
from launch.store import Trial, trials_of, write_command
from launch.sweep import Retry, check_place, check_ranks, held, measured
from launch.tables import RESULTS
from launch.watcher import Ended, Watcher

CONSIDERED = 5  # times as many candidates as there are trials are ranked anew after each


@dataclass(frozen=True)
class Tried:
    """A candidate with the time that was predicted for it before its trial, and what the trial gave."""

    ranked: Ranked
    predicted_s: float
    measurement: Measurement

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to what was measured."""
        if self.measurement.status is not Status.OK:
            return None
        return self.predicted_s / self.measurement.median_s - 1


def run_tune(recipe: LoadedRecipe, search: Search, watcher: Watcher, *, retry: Retry) -> list[Tried]:
    """Try the best candidates of ``search``, at most search.trials, each the best by what is known until then.

    What has ended in an earlier run is not run again, but for what failed, as far as ``retry`` says. On SIGINT or
    SIGTERM the running trial is ended, and KeyboardInterrupt is raised; what has ended stays.
    """
    check_place(recipe)
    if recipe.values.model.layers is not None:
        raise recipe.error("model.layers", "measured layers can be predicted, not trained; tune takes a model")
    trials = recipe.values.search.trials
    left = {one: search.maker.model.estimate(one.plan) for one in _runnable(recipe, search)}
    estimates: list[Estimate] = []
    tried: list[Tried] = []
    with held(recipe), Elsewhere() as elsewhere:
        write_command(recipe, "tune")
        chosen: list[str] = []
        watcher.begin(min(trials, len(left)), [], 0)
        while left and len(tried) < trials:
            known = [one.measurement.median_s for one in tried if one.error is not None]
            correction = correct(estimates, known)
            best = min(left, key=lambda one: correction.seconds(left[one]))
            estimate = left.pop(best)
            trial = _trial(recipe, best)
            if trial is None:
                continue
            check_ranks(recipe, trial.plan.ranks)
            check_plans(recipe, [trial.plan], elsewhere, watcher.tell)
            chosen.append(trial.name)
            write_command(recipe, "tune", trials=chosen)
            measurement = measured(recipe, trial, _Numbered(watcher, len(tried) + 1, trials), retry=retry)
            one = Tried(replace(best, plan=trial.plan), correction.seconds(estimate), measurement)
            tried.append(one)
            if one.error is not None:
                estimates.append(estimate)
    return tried


def first_trial(recipe: LoadedRecipe, search: Search) -> Trial:
    """What a tune of ``search`` begins with; raises RecipeError if nothing of it can run."""
    trials = (_trial(recipe, one) for one in _runnable(recipe, search))
    first = next((trial for trial in trials if trial is not None), None)
    if first is None:
        raise recipe.error("search", "no candidate fits the memory of its devices")
    return first


def _runnable(recipe: LoadedRecipe, search: Search) -> list[Ranked]:
    """The best candidates that can run, fastest first by prediction."""
    found = [one for one in search.ranked() if not cannot_run(one.plan)][: CONSIDERED * recipe.values.search.trials]
    if not found:
        raise recipe.error("search", "no candidate can run yet: all have tensor parallelism; allow search.tp: [1]")
    return found


def _trial(recipe: LoadedRecipe, one: Ranked) -> Trial | None:
    """None where it does not fit, by the bytes that the runtime counts."""
    try:
        (trial,) = trials_of(recipe, [exact_plan(recipe, one)])
    except InputError:
        return None
    return trial


@dataclass(frozen=True)
class _Numbered:
    """Tells ``watcher`` of one trial as the ``number``-th of ``total``."""

    watcher: Watcher
    number: int
    total: int

    def tell(self, line: str) -> None:
        self.watcher.tell(line)

    def start(self, trial: Trial) -> None:
        self.watcher.start(trial)

    def end(self, ended: Ended) -> None:
        self.watcher.end(replace(ended, number=self.number, total=self.total))


def fastest(tried: Sequence[Tried]) -> Tried | None:
    return min((one for one in tried if one.error is not None), key=lambda one: one.measurement.median_s, default=None)


def table(tried: Sequence[Tried], form: str) -> str:
    """Predicted beside measured, fastest first."""
    rows = []
    for one in sorted(tried, key=lambda one: (one.error is None, one.error is not None and one.measurement.median_s)):
        measured = "-" if one.error is None else f"{one.measurement.median_s:.4g}"
        error = "-" if one.error is None else f"{one.error:+.1%}"
        _, *choices = cells(one.ranked)
        rows.append(
            (f"{one.ranked.seconds:.4g}", f"{one.predicted_s:.4g}", measured, error, *choices, one.measurement.status)
        )
    headings = ["cost\nmodel (s)", *HEADINGS[:1], "measured\n(s)", "error", *HEADINGS[1:], "status"]
    if form == "github":
        headings = [heading.replace("-\n", "-").replace("\n", " ") for heading in headings]
    return tabulate(rows, headings, tablefmt=form, disable_numparse=True)


def told(tried: Sequence[Tried]) -> str:
    """How good the predictions were, and what trials made of the cost model."""
    good = [one for one in tried if one.error is not None]
    if not good:
        return "no trial is ok"
    before = mean(abs(one.ranked.seconds / one.measurement.median_s - 1) for one in good)
    after = mean(abs(one.error) for one in good)
    return (
        f"mean error of {len(good)} trials: {before:.1%} by the cost model alone, {after:.1%} by what was predicted "
        "before each trial, when the earlier ones had corrected it; predictions are simulated, measurements are medians"
    )


def write(recipe: LoadedRecipe, tried: Sequence[Tried]) -> list[Path]:
    """Write results/<recipe>/tune.md and, if a trial is ok, best_plan.json; returns the files."""
    folder = RESULTS / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"tune.md": f"{table(tried, 'github')}\n\n{told(tried)}. Again: `{recipe.command('tune')}`\n"}
    if best := fastest(tried):
        contents["best_plan.json"] = best.ranked.plan.to_json() + "\n"
    for name, text in contents.items():
        write_whole(folder / name, text)
    return [folder / name for name in contents]
