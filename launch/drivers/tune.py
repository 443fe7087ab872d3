"""`auto3d tune`: search, then the best candidates by real trials, which correct the cost model on the way.

The fastest of them are tried again, in turns, until their order is certain or the trials are spent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from rich.console import Console
from tabulate import tabulate

from auto3d.cost.model import Estimate
from auto3d.cost.profile import ProfileError
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.measurement import Measurement, Status
from auto3d.search.certainty import CERTAIN, compare_plans, contenders
from auto3d.search.correction import correct
from auto3d.search.search import Ranked, Search
from launch.console.profile import measure_with_progress, write_profile
from launch.console.ranking import HEADINGS, cells
from launch.console.tables import RESULTS
from launch.drivers.sweep import Retry, check_place, check_ranks, held, measured
from launch.model.candidates import exact_plans
from launch.model.capture_process import CaptureProcess
from launch.model.check_capture import check_plans
from launch.model.graphs import PlanningModel
from launch.model.profile import find_profile, how_to_measure, tuned_file
from launch.model.ranking import predicted_on
from launch.model.search import cannot_run
from launch.recipe.load import LoadedRecipe, RecipeError
from launch.recipe.schema import AUTO
from launch.slurm.executor import on_slurm
from launch.store.files import write_whole
from launch.store.trials import Trial, again, trials_of, write_command
from launch.store.watcher import Ended, Watcher

CONSIDERED = 5  # times as many candidates as there are trials are ranked anew after each
REPEATED = 0.4  # share of the trials that is kept for repeating the fastest


@dataclass(frozen=True)
class Tried:
    """A candidate with the time that was predicted for it before its first trial, and what its trials gave."""

    ranked: Ranked
    predicted_s: float
    trial: Trial  # the first
    measurements: tuple[Measurement, ...]

    @property
    def times(self) -> list[float]:
        """Seconds of an iteration, by each trial that is ok: the median of its iterations."""
        return [one.median_s for one in self.measurements if one.status is Status.OK]

    @property
    def seconds(self) -> float:
        """Median of its trials; one of them must be ok."""
        return median(self.times)

    @property
    def repeatable(self) -> bool:
        return len(self.times) == len(self.measurements) > 0

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to what was measured; None if no trial is ok."""
        return self.predicted_s / self.seconds - 1 if self.times else None


def measure_if_unknown(recipe: LoadedRecipe, console: Console) -> None:
    """Measure this machine for ``recipe`` where its predictions would rest on a guess, and its trials run here.

    The profile is kept, so this is done once. Where it cannot be measured, a line says why, and tune goes on without.
    """
    values = recipe.values

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    try:
        if find_profile(recipe, lambda samples: PlanningModel(recipe).graph(samples).fingerprint) is not None:
            return
    except RecipeError:
        if values.prediction.profile != AUTO:
            raise  # else the cluster's profile is of another model or setting, and this recipe gets its own
    command = how_to_measure(recipe, "")
    if not command:
        return
    if on_slurm(recipe):
        say(f"no profile: trials run on SLURM, and predictions rest on a guess; to measure a node: srun -N1 {command}")
        return
    check_place(recipe)
    file = tuned_file(recipe)
    say(f"measuring this machine for the predictions, once, about 30 s: {file} (--no-profile skips it)")
    try:
        write_profile(measure_with_progress(recipe, console), file)
    except ProfileError as error:
        reason = str(error).strip().splitlines()[-1]
        say(f"this machine could not be measured, so predictions are a guess: {reason}")


def run_tune(recipe: LoadedRecipe, search: Search, watcher: Watcher, *, retry: Retry) -> list[Tried]:
    """Try the best candidates of ``search``, each the best by what is known until then, and the fastest of them again.

    All of this is at most search.trials. What has ended in an earlier run is not run again, but for what failed, as far
    as ``retry`` says. On SIGINT or SIGTERM the running trial is ended, and KeyboardInterrupt is raised; what has ended
    stays.
    """
    check_place(recipe)
    if recipe.values.model.layers is not None:
        raise recipe.error("model.layers", "measured layers can be predicted, not trained; tune takes a model")
    candidates = _runnable(recipe, search)
    with held(recipe), CaptureProcess() as process:
        write_command(recipe, "tune")
        watcher.begin(recipe.values.search.trials, [], 0)
        trials = _Trials(recipe, watcher, retry, process)
        tried = _try_best(recipe, search, candidates, trials)
        _try_again(tried, trials)
    return tried


class _Trials:
    """Runs trials one after the other, as far as search.trials goes."""

    def __init__(self, recipe: LoadedRecipe, watcher: Watcher, retry: Retry, process: CaptureProcess) -> None:
        self._recipe, self._watcher, self._retry, self._process = recipe, watcher, retry, process
        self._names: list[str] = []
        self.total = recipe.values.search.trials

    @property
    def left(self) -> int:
        return self.total - len(self._names)

    def run(self, trial: Trial) -> Measurement:
        check_ranks(self._recipe, trial.plan.ranks)
        check_plans(self._recipe, [trial.plan], self._process, self._watcher.tell)
        self._names.append(trial.name)
        write_command(self._recipe, "tune", trials=self._names)
        watcher = _Numbered(self._watcher, len(self._names), self.total)
        return measured(self._recipe, trial, watcher, retry=self._retry)


def _try_best(recipe: LoadedRecipe, search: Search, candidates: Sequence[Ranked], trials: _Trials) -> list[Tried]:
    """Each of the best candidates once; keeps trials to repeat some."""
    left = {one: search.maker.model.estimate(one.plan) for one in candidates}
    exact = exact_plans(recipe)
    repeats = int(REPEATED * trials.total)
    estimates: list[Estimate] = []
    tried: list[Tried] = []
    while left and trials.left > (repeats if repeats > 1 else 0):
        correction = correct(estimates, [one.seconds for one in tried if one.times])
        best = min(left, key=lambda one: correction.seconds(left[one]))
        estimate = left.pop(best)
        trial = _trial(recipe, exact, best)
        if trial is None:
            continue
        found = replace(best, plan=trial.plan)
        tried.append(Tried(found, correction.seconds(estimate), trial, (trials.run(trial),)))
        if tried[-1].times:
            estimates.append(estimate)
    return tried


def _try_again(tried: list[Tried], trials: _Trials) -> None:
    """Repeat the fastest of ``tried``, round after round, one after the other in each, so that all meet the same noise.

    Their entries in ``tried`` are replaced. A plan whose trial is not ok is not repeated.
    """
    while trials.left > 1:
        good = [place for place, one in enumerate(tried) if one.repeatable]
        if not (chosen := contenders([tried[place].times for place in good], trials.left // 2)):
            return
        for place in [good[number] for number in chosen][: trials.left]:
            one = tried[place]
            measurement = trials.run(again(one.trial, len(one.measurements) + 1))
            tried[place] = replace(one, measurements=(*one.measurements, measurement))


def first_trial(recipe: LoadedRecipe, search: Search) -> Trial:
    """What a tune of ``search`` begins with; raises RecipeError if nothing of it can run."""
    exact = exact_plans(recipe)
    trials = (_trial(recipe, exact, one) for one in _runnable(recipe, search))
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


def _trial(recipe: LoadedRecipe, exact: Callable[[Ranked], Plan], one: Ranked) -> Trial | None:
    """None where it does not fit, by the bytes that the runtime counts."""
    try:
        (trial,) = trials_of(recipe, [exact(one)])
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
    return min((one for one in tried if one.times), key=lambda one: one.seconds, default=None)


def table(tried: Sequence[Tried], form: str) -> str:
    """Predicted beside measured, fastest first."""
    rows = []
    for one in sorted(tried, key=lambda one: (not one.times, one.seconds if one.times else 0.0)):
        measured = f"{one.seconds:.4g}" if one.times else "-"
        error = f"{one.error:+.1%}" if one.times else "-"
        status = next((m.status for m in one.measurements if m.status is not Status.OK), Status.OK)
        _, *choices = cells(one.ranked)
        times = (f"{one.ranked.seconds:.4g}", f"{one.predicted_s:.4g}", measured, len(one.times), error)
        rows.append((*times, *choices, status))
    headings = ["cost\nmodel (s)", *HEADINGS[:1], "measured\n(s)", "trials", "error", *HEADINGS[1:], "status"]
    if form == "github":
        headings = [heading.replace("-\n", "-").replace("\n", " ") for heading in headings]
    return tabulate(rows, headings, tablefmt=form, disable_numparse=True)


def told(recipe: LoadedRecipe, search: Search, tried: Sequence[Tried]) -> str:
    """How certain the order is, how good the predictions were, and what trials made of the cost model."""
    good = [one for one in tried if one.times]
    if not good:
        return "no trial is ok"
    errors = [(one.ranked.seconds / time - 1, one.predicted_s / time - 1) for one in good for time in one.times]
    before, after = (mean(map(abs, column)) for column in zip(*errors, strict=True))
    return (
        f"{order(recipe, good)}.\n"
        f"mean error of {len(errors)} trials: {before:.1%} by the cost model alone, {after:.1%} by what was predicted "
        "before each plan's first trial, when the earlier ones had corrected it; measured: the "
        f"median over a plan's trials of the median over its iterations. {predicted_on(recipe, search)}"
    )


def order(recipe: LoadedRecipe, good: Sequence[Tried]) -> str:
    """How certain it is that the fastest of these plans is the fastest, and against which one least."""
    if len(good) == 1:
        return "one plan alone is ok, so there is no order"
    verdict = compare_plans([one.times for one in good])
    best = good[verdict.fastest]
    more = f"more trials: search.trials={2 * recipe.values.search.trials}"
    if all(len(one.times) == 1 for one in good):
        return f"each plan was tried once, so it is not known how certain their order is; {more}"
    rival = good[max(range(len(good)), key=lambda place: (verdict.doubts[place], -good[place].seconds))]
    against = f"{_words(rival)}: {rival.seconds:.4g} s, {rival.seconds / best.seconds - 1:+.1%}"
    if verdict.certainty >= CERTAIN:
        return f"the fastest is certain to {verdict.certainty:.1%}; the next: {against}"
    doubt = max(verdict.doubts)
    return f"the fastest is not certain: with probability {doubt:.0%} another is faster ({against}); {more}"


def _words(one: Tried) -> str:
    candidate = one.ranked.candidate
    degrees = f"dp={candidate.dp} tp={candidate.tp} pp={candidate.pp} micro-batch={candidate.micro_batch_size}"
    return f"{degrees} {candidate.schedule}"


def write(recipe: LoadedRecipe, search: Search, tried: Sequence[Tried]) -> list[Path]:
    """Write results/<recipe>/tune.md and, if a trial is ok, best_plan.json; returns the files."""
    folder = RESULTS / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    text = f"{table(tried, 'github')}\n\n{told(recipe, search, tried)}\n\nAgain: `{recipe.command('tune')}`\n"
    contents = {"tune.md": text}
    if best := fastest(tried):
        contents["best_plan.json"] = best.ranked.plan.to_json() + "\n"
    for name, content in contents.items():
        write_whole(folder / name, content)
    return [folder / name for name in contents]
