"""`auto3d tune`: search, then real trials of the best candidates, which correct the cost model as they end.

The fastest plans are tried again, in turns, until their order is certain or the number of trials is reached.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rich.console import Console

from auto3d.cost.estimate import Estimate
from auto3d.cost.profile import ProfileError
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.measurement import Measurement, Status
from auto3d.search.algorithms import AMP
from auto3d.search.certainty import contenders
from auto3d.search.correction import correct
from auto3d.search.search import Ranked, Search
from launch.console.profile import measure_with_progress, write_profile
from launch.drivers.sweep import Retry, check_place, check_ranks, measured
from launch.executors.trial_executor import TrialExecutor, executor_of
from launch.model.candidates import exact_plans
from launch.model.capture_process import CaptureProcess
from launch.model.check_capture import check_plans
from launch.model.graphs import PlanningModel
from launch.model.profile import find_profile, how_to_measure, tuned_file
from launch.recipe.load import LoadedRecipe, RecipeError
from launch.recipe.schema_key import AUTO
from launch.recipe.settings import most_trials
from launch.slurm.executor import on_slurm
from launch.store.trials import Command, Trial, again, trials_of, write_command
from launch.store.watcher import SomeTrials, Watcher

CONSIDERED = 5  # candidates that are ranked again after each trial, per trial of search.trials
REPEATED = 0.4  # fraction of the trials that is reserved for repeating the fastest plans


@dataclass(frozen=True)
class TriedPlan:
    """A candidate, the time that was predicted for it before its first trial, and the results of its trials."""

    ranked: Ranked
    predicted_s: float
    trial: Trial  # the first
    measurements: tuple[Measurement, ...]

    @property
    def times(self) -> list[float]:
        """Seconds per iteration of each successful trial: the median over its iterations."""
        return [measurement.median_s for measurement in self.measurements if measurement.status is Status.OK]

    @property
    def seconds(self) -> float:
        """Median of ``times``, which must not be empty."""
        return median(self.times)

    @property
    def repeatable(self) -> bool:
        """Whether all its trials succeeded."""
        return len(self.times) == len(self.measurements) > 0

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None if no trial succeeded."""
        return self.predicted_s / self.seconds - 1 if self.times else None


def measure_if_unknown(recipe: LoadedRecipe, console: Console) -> None:
    """Measure this machine for ``recipe`` if its trials run here and its predictions would be guesses.

    The profile is kept, so this happens once. If the machine cannot be measured, a line says why and tune continues.
    """
    values = recipe.values

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    try:
        if find_profile(recipe, lambda samples: PlanningModel(recipe).graph(samples).fingerprint) is not None:
            return
    except RecipeError:
        if values.prediction.profile != AUTO:
            raise  # with auto, the cluster's profile is of another model or setting, and this recipe gets its own
    command = how_to_measure(recipe, "")
    if not command:
        return
    if on_slurm(recipe):
        say(f"no profile: trials run on SLURM, and predictions rest on a guess; to measure a node: srun -N1 {command}")
        return
    check_place(recipe, "tune")
    file = tuned_file(recipe)
    say(f"measuring this machine for the predictions, once, about 30 s: {file} (--no-profile skips it)")
    try:
        write_profile(measure_with_progress(recipe, console), file)
    except ProfileError as error:
        reason = str(error).strip().splitlines()[-1]
        say(f"this machine could not be measured, so predictions are a guess: {reason}")


def run_tune(recipe: LoadedRecipe, search: Search, watcher: Watcher, *, retry: Retry) -> list[TriedPlan]:
    """Try the best candidates of ``search``, then the fastest again; returns all with their results.

    The results so far decide which candidate is tried next. At most search.trials trials run. Trials that ended in an
    earlier run do not run again, except failed ones as ``retry`` says. SIGINT and SIGTERM end the running trial and
    raise KeyboardInterrupt; results are kept.
    """
    check_place(recipe, "tune")
    if recipe.values.model.layers is not None:
        raise recipe.error("model.layers", "measured layers can be predicted, not trained; tune takes a model")
    candidates = _considered(recipe, search)
    with executor_of(recipe) as executor, CaptureProcess() as process:
        write_command(recipe, Command("tune", [*recipe.overrides]))
        watcher.begin(most_trials(recipe.values), [], 0)
        trials = _Trials(recipe, executor, watcher, retry, process)
        tried = _try_best(recipe, search, candidates, trials)
        if recipe.values.search.algorithm != AMP:
            _try_again(tried, trials)
    return tried


class _Trials:
    """Runs up to search.trials trials, one after the other."""

    def __init__(
        self, recipe: LoadedRecipe, executor: TrialExecutor, watcher: Watcher, retry: Retry, process: CaptureProcess
    ) -> None:
        self._recipe, self._executor, self._process = recipe, executor, process
        self._watcher, self._retry = watcher, retry
        self._names: list[str] = []
        self.total = most_trials(recipe.values)

    @property
    def remaining(self) -> int:
        return self.total - len(self._names)

    def run(self, trial: Trial) -> Measurement:
        check_ranks(self._recipe, trial.plan.ranks, "tune")
        check_plans(self._recipe, [trial.plan], self._process, self._watcher.tell)
        self._names.append(trial.name)
        write_command(self._recipe, Command("tune", [*self._recipe.overrides], trials=self._names))
        watcher = SomeTrials(self._watcher, len(self._names) - 1, self.total)
        return measured(self._recipe, trial, self._executor, watcher, retry=self._retry)


def _try_best(recipe: LoadedRecipe, search: Search, candidates: Sequence[Ranked], trials: _Trials) -> list[TriedPlan]:
    """Try each of the best candidates once; some trials are reserved for repeating the fastest."""
    untried = {candidate: search.maker.model.estimate(candidate.plan) for candidate in candidates}
    exact = exact_plans(recipe)
    repeats = 0 if recipe.values.search.algorithm == AMP else int(REPEATED * trials.total)
    estimates: list[Estimate] = []
    tried: list[TriedPlan] = []
    while untried and trials.remaining > (repeats if repeats > 1 else 0):
        correction = correct(estimates, [plan.seconds for plan in tried if plan.times])
        best = min(untried, key=lambda candidate: correction.seconds(untried[candidate]))
        estimate = untried.pop(best)
        trial = _trial(recipe, exact, best)
        if trial is None:
            continue
        exact_plan = replace(best, plan=trial.plan)
        tried.append(TriedPlan(exact_plan, correction.seconds(estimate), trial, (trials.run(trial),)))
        if tried[-1].times:
            estimates.append(estimate)
    return tried


def _try_again(tried: list[TriedPlan], trials: _Trials) -> None:
    """Repeat the fastest of ``tried`` in rounds, one trial of each per round, so that all meet the same noise.

    Replaces their entries in ``tried``. A plan with a trial that did not succeed is not repeated.
    """
    while trials.remaining > 1:
        good = [place for place, plan in enumerate(tried) if plan.repeatable]
        if not (chosen := contenders([tried[place].times for place in good], trials.remaining // 2)):
            return
        for place in [good[number] for number in chosen][: trials.remaining]:
            repeated = tried[place]
            measurement = trials.run(again(repeated.trial, len(repeated.measurements) + 1))
            tried[place] = replace(repeated, measurements=(*repeated.measurements, measurement))


def first_trial(recipe: LoadedRecipe, search: Search) -> Trial:
    """The first trial of a tune of ``search``; raises RecipeError if no candidate can run."""
    exact = exact_plans(recipe)
    trials = (_trial(recipe, exact, candidate) for candidate in _considered(recipe, search))
    first = next((trial for trial in trials if trial is not None), None)
    if first is None:
        raise recipe.error("search", "no candidate fits the memory of its devices")
    return first


def _considered(recipe: LoadedRecipe, search: Search) -> list[Ranked]:
    """The candidates that may be tried, the fastest by prediction first."""
    return search.ranked()[: CONSIDERED * most_trials(recipe.values)]


def _trial(recipe: LoadedRecipe, exact: Callable[[Ranked], Plan], candidate: Ranked) -> Trial | None:
    """The trial of the candidate; None if it does not fit into memory by the bytes that the runtime counts."""
    try:
        (trial,) = trials_of(recipe, [exact(candidate)])
    except InputError:
        return None
    return trial


def fastest(tried: Sequence[TriedPlan]) -> TriedPlan | None:
    """The fastest plan; None if no trial succeeded."""
    return min((plan for plan in tried if plan.times), key=lambda plan: plan.seconds, default=None)
