"""The rows of a part: what each system reaches at each setting, predicted or run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from json import dumps
from pathlib import Path
from typing import Any

from auto3d.cost.throughput import throughput
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.measurement import Measurement, Status
from auto3d.search.axes import plan_name
from auto3d.search.planned_model import PlannedModel
from launch.drivers.sweep import Retry, Sweep, left_of, run_grid, run_sweep
from launch.model.costs import planning_subject
from launch.model.search import search_recipe
from launch.papers.experiments import EXPERIMENTS
from launch.papers.item import FOLDER, Part, Setting
from launch.papers.row import Row
from launch.papers.stored import run_of
from launch.recipe.error import RecipeError
from launch.recipe.load import LoadedRecipe, load_groups
from launch.recipe.overrides import read_overrides, replaced
from launch.recipe.settings import cluster, device
from launch.store.trials import Command, Trial
from launch.store.watcher import Watcher

GIB = 2**30
PLANNERS = ("chimera", "megatron", "rannc", "rannc-any-depth", "amp")  # algorithms that are other systems' planners
TRIALS = 1  # plans of a row that are measured, where its search.trials says nothing
SEARCH = {"search.algorithm": "auto", "search.seconds": 1e7}  # limited by candidates: a clock would change results
_SIZES = (("cluster", "nodes"), ("cluster", "devices_per_node"), ("cluster", "more"))
MOST_SUBJECTS = 4  # models in memory; a setting's are used one after the other
RUN = {"launch.executor": "local"}


class RowMaker:
    """Makes rows of the parts of one item, which ``file`` declares; a user's ``overrides`` replace its rows' own.

    Predictions for the same model share its Graphs. Sweeps report to ``watcher``.
    """

    def __init__(self, name: str, file: Path, watcher: Watcher, overrides: Sequence[str] = ()) -> None:
        self._name, self._file, self._watcher, self._overrides = name, file, watcher, tuple(overrides)
        self._words = (name if file == FOLDER / f"{name}.yaml" else str(file), *overrides)
        self._subjects: dict[str, PlannedModel] = {}
        self._rows: dict[str, dict[str, Any]] = {}  # what decides a row -> the row; parts and causes share rows

    def rows(self, part: Part) -> list[Row]:
        """All rows of ``part``, setting by setting."""
        if part.experiment is not None:
            return list(self._experiment(part))
        if part.how != "simulated":
            return self._run_together(part)
        made = []
        for setting, system in _cells(part):
            self._watcher.tell(f"{self._name}: {', '.join([*setting, system])}")
            made.append(self.row(part, setting, system))
        return made

    def row(self, part: Part, setting: Setting, system: str, changed: Mapping[str, Any] | None = None) -> Row:
        """The row of ``system`` at ``setting``, with further overrides ``changed``."""
        overrides = part.overrides(setting, system) | dict(changed or {})
        known = dumps([part.how, part.base, overrides], sort_keys=True)
        if known not in self._rows:
            recipe = self.recipe(part, overrides)
            try:
                self._rows[known] = self._predicted(recipe) if part.how == "simulated" else self._run_alone(recipe)
            except InputError as error:
                self._rows[known] = self._problem(error)
        return Row(setting=setting, system=system, **self._rows[known])

    def recipe(self, part: Part, overrides: Mapping[str, Any]) -> LoadedRecipe:
        """The recipe of a row: the base of ``part`` with all overrides of the row."""
        fixed = SEARCH if part.how == "simulated" else RUN
        if part.how == "emulated":
            fixed = fixed | {"training.compute": "emulated"}
        written = [f"{key}={dumps(value)}" for key, value in {**fixed, **overrides}.items()]
        own = load_groups(run_of(self._name), self._file, part.base, written)
        return replace(self._changed(part, own) if self._overrides else own, paper=self._words)

    def _changed(self, part: Part, own: LoadedRecipe) -> LoadedRecipe:
        """``own`` with the user's overrides. Another cluster gives as many devices, unless these say how many nodes."""

        def with_more(*more: str) -> LoadedRecipe:
            changes = replaced(own.overrides, [*self._overrides, *more])
            return load_groups(own.name, self._file, part.base, changes)

        changed = with_more()
        wanted, machine = cluster(own).devices, cluster(changed)
        if machine.devices == wanted or any(path[:2] in _SIZES for path in read_overrides(self._overrides)):
            return changed
        per_node = changed.values.cluster.devices_per_node
        if changed.values.cluster.more or wanted % per_node:
            problem = f"the item has {wanted} devices here, and a node of this cluster {per_node}; say how many nodes"
            raise changed.error("cluster.nodes", problem)
        return with_more(f"cluster.nodes={wanted // per_node}")

    def measured(self, parts: Sequence[Part], command: Command, *, retry: Retry, follow: bool) -> list[list[Row]]:
        """The rows of each of ``parts`` by measurement: of the search.trials plans that are the fastest by prediction.

        All trials run as one sweep, where launch.executor says. ``command`` is what `auto3d resume` shall run.
        """
        cells = [_cells(part) for part in parts]
        recipes = [
            self._to_measure(part, *cell) for part, part_cells in zip(parts, cells, strict=True) for cell in part_cells
        ]
        sweeps = run_grid(recipes, command, retry=retry, watcher=self._watcher, follow=follow)
        pairs = iter(zip(recipes, sweeps, strict=True))
        return [[self._row_of(*cell, *next(pairs)) for cell in part_cells] for part_cells in cells]

    def _row_of(self, setting: Setting, system: str, recipe: LoadedRecipe, sweep: Sweep | InputError) -> Row:
        values = self._problem(sweep) if isinstance(sweep, InputError) else _measured(recipe, sweep)
        return Row(setting=setting, system=system, **values)

    def store(self, parts: Sequence[Part]) -> LoadedRecipe:
        """A recipe by which to look into the store of all rows."""
        return self._to_measure(parts[0], parts[0].settings[0], next(iter(parts[0].systems)))

    def left(self, parts: Sequence[Part], retry: Retry) -> list[Trial]:
        """The trials that ``measured`` would run."""
        trials: dict[Trial, None] = {}
        for part in parts:
            for cell in _cells(part):
                with suppress(InputError):  # the row will say why it has no plan
                    recipe = self._to_measure(part, *cell)
                    only = bool(recipe.values.search.planners)
                    trials |= dict.fromkeys(left_of(recipe, retry, only_planners=only))
        return list(trials)

    def _to_measure(self, part: Part, setting: Setting, system: str) -> LoadedRecipe:
        """The recipe of a row, whose sweep runs search.trials plans."""
        overrides = part.overrides(setting, system)
        search = self.recipe(part, overrides).values.search
        if search.algorithm in PLANNERS:  # the system is that planner: it has one plan
            return self.recipe(part, {**overrides, "search.planners": [search.algorithm]})
        return self.recipe(part, {"search.max_trials": search.trials or TRIALS, **overrides})

    def _problem(self, error: InputError) -> dict[str, Any]:
        problem = str(error)
        if isinstance(error, RecipeError) and error.file == str(self._file):
            problem = error.in_file
        return {"problem": problem, "kind": error.kind}

    def _predicted(self, recipe: LoadedRecipe) -> dict[str, Any]:
        values = recipe.values
        known = f"{values.model} {values.data} {values.prediction} {values.training.precision} {device(values)}"
        if known not in self._subjects:
            self._subjects[known] = planning_subject(recipe, only_predicted=True)
        subject = self._subjects[known]
        while len(self._subjects) > MOST_SUBJECTS:
            del self._subjects[next(iter(self._subjects))]
        search = search_recipe(recipe, subject=subject)
        best, model = search.ranked()[0], search.maker.model
        estimate = model.estimate(best.plan)
        memory = [needed / GIB for needed in estimate.memory]
        rates = throughput(best.plan, best.seconds, flops=model.flops(best.plan))
        assert rates.model_flops_per_s is not None
        return {
            "values": {
                **_speed(best.plan, best.seconds, recipe),
                "tflops": rates.model_flops_per_s / 1e12,
                "peak_gib": max(memory),
                "mean_gib": sum(memory) / len(memory),
                "least_gib": min(memory),
                "balance": min(memory) / max(memory),
                "first_of_peak": memory[0] / max(memory),
                "bubble": estimate.bubble_s / estimate.seconds,
                "billion_parameters": float(subject.work(best.plan.micro_batch_size).parameters.sum()) / 1e9,
            },
            "plan": str(best.candidate),
        }

    def _run_together(self, part: Part) -> list[Row]:
        """The rows of ``part``, which run here one after the other; one process captures the models of all."""
        cells = _cells(part)
        recipes = [self.recipe(part, part.overrides(*cell)) for cell in cells]
        self._watcher.tell(f"{self._name}: {part.title}")
        command = Command("sweep", [*recipes[0].overrides])
        sweeps: list[Sweep | InputError]
        try:
            sweeps = run_grid(recipes, command, retry=Retry.ALL, watcher=self._watcher)
        except InputError as error:  # none has a plan
            sweeps = [error] * len(cells)
        return [self._row_of(*cell, *pair) for cell, pair in zip(cells, zip(recipes, sweeps, strict=True), strict=True)]

    def _run_alone(self, recipe: LoadedRecipe) -> dict[str, Any]:
        return _measured(recipe, run_sweep(recipe, retry=Retry.ALL, watcher=self._watcher))

    def _experiment(self, part: Part) -> Iterator[Row]:
        assert part.experiment is not None
        if part.experiment not in EXPERIMENTS:
            known = ", ".join(EXPERIMENTS)
            raise InputError(f"{self._file}: there is no experiment {part.experiment!r}; it takes {known}")
        experiment = EXPERIMENTS[part.experiment]
        takes = {name: parameter for name, parameter in signature(experiment).parameters.items() if name != "tell"}
        wrong = [f"unknown {name!r}" for name in part.arguments if name not in takes]
        wrong += [
            f"no {name!r}"
            for name, parameter in takes.items()
            if parameter.default is parameter.empty and name not in part.arguments
        ]
        if wrong:
            raise InputError(
                f"{self._file}: arguments of {part.experiment}: {', '.join(wrong)}; "
                f"it takes {', '.join(takes) or 'none'}"
            )
        yield from experiment(tell=self._watcher.tell, **part.arguments)


def _cells(part: Part) -> list[tuple[Setting, str]]:
    return [(setting, system) for setting in part.settings for system in part.systems]


def _measured(recipe: LoadedRecipe, sweep: Sweep) -> dict[str, Any]:
    """The row of the fastest trial of ``sweep``."""
    ended = list(sweep.ended().values())
    if not (good := [measurement for measurement in ended if measurement.status is Status.OK]):
        problem = (
            "; ".join(dict.fromkeys(f"{measurement.status}: {measurement.error}" for measurement in ended))
            or "no trial has ended"
        )
        return {
            "problem": problem,
            "kind": "memory" if any(measurement.status is Status.OOM for measurement in ended) else "other",
        }
    best: Measurement = min(good, key=lambda measurement: measurement.median_s)
    values = _speed(best.plan, best.median_s, recipe)
    if best.peak_bytes:
        memory = [peak / GIB for peak in best.peak_bytes]
        values |= {"peak_gib": max(memory), "mean_gib": sum(memory) / len(memory), "least_gib": min(memory)}
    where, how = best.environment, " (emulated devices)" if best.emulated else ""
    return {
        "values": values,
        "plan": plan_name(best.plan),
        "made_on": f"{where.computer}{how}, torch {where.torch}, {best.finished[:10]}" if where else "",
    }


def _speed(plan: Plan, iteration_s: float, recipe: LoadedRecipe) -> dict[str, float]:
    rate = plan.global_batch / iteration_s
    tokens = recipe.values.data.sequence_length
    return {"iteration_s": iteration_s, "samples_per_s": rate, "tokens_per_s": rate * tokens}
