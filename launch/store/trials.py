"""The result store: one private folder per trial under runs/, each file written whole or not at all."""

import fcntl
import os
import platform
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from importlib.metadata import version
from json import dumps
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.measurement import Measurement, Status
from launch.recipe.load import LoadedRecipe, data_files
from launch.slurm.executor import on_slurm
from launch.store.files import RUNS, private_folder, write_whole
from launch.store.manifest import Entry, Manifest


class StoreError(InputError):
    """The store is in use, or holds nothing."""


@dataclass(frozen=True)
class Trial:
    """One plan of one recipe, and the folder where its run is kept: of a few iterations, or of a whole training."""

    name: str
    folder: Path
    plan: Plan
    checkpoints: Path | None = None  # of a training; a trial has none

    @property
    def measurement_file(self) -> Path:
        return self.folder / "measurement.json"

    @property
    def recipe_file(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def plan_file(self) -> Path:
        return self.folder / "plan.json"

    def measurement(self) -> Measurement | None:
        """What the trial gave, or None if it has not ended."""
        return _read_measurement(self.measurement_file)

    def prepare(self, recipe: LoadedRecipe) -> None:
        """Write what the trial's process needs: the plan and the whole recipe."""
        shutil.rmtree(self.folder, ignore_errors=True)  # of an earlier try
        private_folder(self.folder)
        write_whole(self.plan_file, self.plan.to_json())
        self.recipe_file.write_text(recipe.text, encoding="utf-8")


@dataclass(frozen=True)
class Sweep:
    """The last sweep of a recipe: what it was asked for, and the trials that it consists of."""

    overrides: list[str]
    settings: str  # digest of what decides which trials there are, and what each measures
    trials: list[str]  # names
    left_out: int  # plans beyond search.max_trials


_sweep_adapter = TypeAdapter(Sweep)


def trials_of(recipe: LoadedRecipe, plans: Sequence[Plan]) -> list[Trial]:
    """The trials of ``plans``: a name tells the degrees, and changes with all that changes what would be measured."""
    surroundings = {
        "files": _files(recipe),
        "host": _slurm_nodes(recipe) if on_slurm(recipe) else socket.gethostname(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
    measured = _measured(recipe)
    trials = []
    for plan in plans:
        name = _name(plan, _digest([measured, surroundings, plan.to_json()]))
        trials.append(Trial(name, recipe_folder(recipe) / "trials" / name, plan))
    return trials


def again(trial: Trial, number: int) -> Trial:
    """The ``number``-th trial of the plan of ``trial``, which is the first: as kept in the store, and run once, too."""
    if number == 1:
        return trial
    name = f"{trial.name}-{number}"
    return replace(trial, name=name, folder=trial.folder.with_name(name))


def training_of(recipe: LoadedRecipe, plan: Plan) -> Trial:
    """The training of ``recipe`` under ``plan``; its name changes with all that changes what is learnt."""
    learnt = _measured(recipe)
    for group in ("cluster", "measure", "emulation"):
        del learnt[group]
    if recipe.values.training.learning_rate_schedule != "constant":
        learnt["iterations"] = recipe.values.training.iterations
    name = f"train-{_name(plan, _digest([learnt, _files(recipe), plan.to_json()]))}"
    folder = recipe_folder(recipe)
    return Trial(name, folder / "trials" / name, plan, checkpoints=folder / "checkpoints" / name)


def _name(plan: Plan, digest: str) -> str:
    return f"dp{plan.dp}-tp{plan.tp}-pp{plan.pp}-mb{plan.micro_batch_size}-{plan.schedule}-{digest[:8]}"


def _files(recipe: LoadedRecipe) -> list[tuple[str, int, int]]:
    """The files that the recipe reads, with what tells whether one was changed."""
    files = data_files(recipe.values) + [recipe.values.model.weights] * (recipe.values.model.weights is not None)
    return [(str(Path(file).resolve()), (state := os.stat(file)).st_size, state.st_mtime_ns) for file in files]


def manifest_of(recipe: LoadedRecipe) -> Manifest:
    return Manifest(recipe_folder(recipe) / "manifest.jsonl")


def job_folder(recipe: LoadedRecipe, submission: str) -> Path:
    """Where a submission to SLURM keeps its sbatch text, its pickled calls and what its trials print."""
    return (recipe_folder(recipe) / "jobs" / submission).resolve()


def log_folder(recipe: LoadedRecipe, trial: str) -> Path:
    """Where the log files of a trial on this machine are; those of a job are in its ``job_folder``."""
    return recipe_folder(recipe) / "trials" / trial / "job"


def log_files(recipe: LoadedRecipe, entry: Entry) -> list[Path]:
    """What the last start of a trial prints: by each task of its job, the first node's first, or by it alone."""
    if entry.job:
        found = job_folder(recipe, entry.submission).glob(f"{entry.job}_*_log.*")
    else:
        found = log_folder(recipe, entry.trial).glob("*_log.*")
    return sorted(found, key=lambda file: (int(file.name.split("_")[-2]), file.suffix))


@dataclass(frozen=True)
class Command:
    """What was run last of a recipe, for `resume`."""

    verb: str
    overrides: list[str]
    plan_file: str | None = None  # of a training
    trials: list[str] = field(default_factory=list)  # of a tune: those that it has chosen until now; of a training: it


_command_adapter = TypeAdapter(Command)


def write_command(recipe: LoadedRecipe, verb: str, plan_file: str | None = None, *, trials: Sequence[str] = ()) -> None:
    file = private_folder(recipe_folder(recipe)) / "command.json"
    write_whole(file, dumps(asdict(Command(verb, list(recipe.overrides), plan_file, list(trials)))))


def last_command(recipe: LoadedRecipe) -> Command | None:
    try:
        return _command_adapter.validate_json((recipe_folder(recipe) / "command.json").read_bytes())
    except (OSError, ValidationError):
        return None


def write_sweep(recipe: LoadedRecipe, trials: Sequence[Trial], *, left_out: int) -> None:
    sweep = Sweep(list(recipe.overrides), settings_digest(recipe), [trial.name for trial in trials], left_out)
    write_whole(private_folder(recipe_folder(recipe)) / "sweep.json", dumps(asdict(sweep), indent=1))


def last_sweep(recipe: LoadedRecipe) -> Sweep | None:
    """The last sweep of the recipe of this name, whatever its settings were; None if there is none that can be read."""
    try:
        return _sweep_adapter.validate_json((recipe_folder(recipe) / "sweep.json").read_bytes())
    except (OSError, ValidationError):
        return None


def measurements_of(recipe: LoadedRecipe, sweep: Sweep) -> list[Measurement]:
    """Of the trials that have ended."""
    found = (measurement_of(recipe, name) for name in sweep.trials)
    return [measurement for measurement in found if measurement is not None]


def measurement_of(recipe: LoadedRecipe, trial: str) -> Measurement | None:
    """Of the trial of that name, or None if it has not ended."""
    return _read_measurement(recipe_folder(recipe) / "trials" / trial / "measurement.json")


def settings_digest(recipe: LoadedRecipe) -> str:
    """Equal for recipes whose sweeps, on one machine, have the same trials."""
    values = recipe.values
    return _digest([_measured(recipe), asdict(values.search), asdict(values.prediction), values.cluster.memory_gib])


def _measured(recipe: LoadedRecipe) -> dict[str, Any]:
    """The keys that change what a trial measures."""
    values = asdict(recipe.values)
    measured = {group: values[group] for group in ("model", "data", "cluster", "training", "emulation", "measure")}
    del measured["training"]["iterations"]  # of `auto3d train`; a trial has its own
    del measured["training"]["timeout_s"]
    del measured["training"]["checkpoint_every"]
    del measured["training"]["check_capture"]
    del measured["cluster"]["memory_gib"]  # decides which plans there are, not what one of them does
    return measured


def _slurm_nodes(recipe: LoadedRecipe) -> list[str | None]:
    """What decides on which kind of node SLURM runs a trial, and in which container."""
    launch = recipe.values.launch
    names = ("partition", "constraint", "gres", "gpus_per_node", "nodelist", "container", "container_image")
    return ["SLURM", *(getattr(launch, name) for name in names)]


def _digest(content: Any) -> str:
    return sha256(dumps(content, sort_keys=True).encode()).hexdigest()


def recipe_folder(recipe: LoadedRecipe) -> Path:
    return RUNS / recipe.name


def _read_measurement(file: Path) -> Measurement | None:
    try:
        measurement = Measurement.from_json(file.read_bytes())
    except (OSError, ValidationError):  # absent, of another version, or damaged: as if it had not run
        return None
    some = measurement.iteration_s or measurement.first_iteration  # a training's last checkpoint leaves none to do
    damaged = measurement.status is Status.OK and not (some and (measurement.peak_bytes or measurement.emulated))
    return None if damaged else measurement


@contextmanager
def exclusive(recipe: LoadedRecipe, training: Trial | None = None) -> Iterator[None]:
    """Hold the recipe's store, or a ``training`` of it; raises StoreError if another process does.

    The kernel frees it however we end.
    """
    file = private_folder(recipe_folder(recipe)) / ("lock" if training is None else f"{training.name}.lock")
    with file.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            what = f"another sweep of {recipe.name} is running" if training is None else "this training is running"
            raise StoreError(f"{file}: {what} (process {lock.read()})") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def in_use(recipe: LoadedRecipe) -> bool:
    """Whether a process of this machine runs trials of the recipe here."""
    try:
        with (recipe_folder(recipe) / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
