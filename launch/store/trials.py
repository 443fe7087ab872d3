"""The result store: one private folder per trial under runs/; a file is written completely or not at all."""

import fcntl
import os
import platform
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from importlib.metadata import version
from json import dumps
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from auto3d.errors import InputError
from auto3d.plan import AUTO3D, Plan
from auto3d.runtime.measurement import Measurement, Status
from auto3d.search.axes import AXES, Candidate
from launch.peers.limits import engine_version
from launch.recipe.load import LoadedRecipe, data_files
from launch.recipe.search_schema import SearchRecipe
from launch.slurm.executor import on_slurm
from launch.store.files import RUNS, private_folder, write_whole
from launch.store.manifest import Entry, Manifest


class StoreError(InputError):
    """The store is in use by another process, or it is empty."""


@dataclass(frozen=True)
class Trial:
    """A run of one plan of one recipe, for a few iterations or as a whole training, and the folder of its files."""

    name: str
    folder: Path
    plan: Plan
    recipe: LoadedRecipe = field(compare=False, repr=False)
    checkpoints: Path | None = None  # folder for the checkpoints of a training; None for a trial

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
        """The trial's result, or None if it has not ended."""
        return _read_measurement(self.measurement_file)

    def prepare(self) -> None:
        """Create the folder with what the trial's process needs: the plan and the recipe with its overrides."""
        shutil.rmtree(self.folder, ignore_errors=True)  # files of an earlier attempt
        private_folder(self.folder)
        write_whole(self.plan_file, self.plan.to_json())
        self.recipe_file.write_text(self.recipe.text, encoding="utf-8")


@dataclass(frozen=True)
class SweepRecord:
    """The last sweep of a recipe, or of several that share its store, as sweep.json has it."""

    overrides: list[str]
    settings: str  # settings_digest() of its recipe; empty if there are several
    trials: list[str]  # names
    left_out: int  # number of candidates beyond search.max_trials
    predicted_s: dict[str, float] = field(default_factory=dict)  # name of a trial -> predicted seconds per iteration
    predicted_on: str = ""  # the basis of these predictions
    profiled: bool = True  # whether these predictions rest on a profile, or their times are not times of devices
    candidates: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a trial -> the Candidate of its plan, by field, and the ``planner`` of search.planners, if any."""
    rows: dict[str, list[str]] = field(default_factory=dict)  # of several recipes: settings_digest() -> trials

    def trials_of(self, settings: str) -> list[str]:
        """The names of the trials of the recipe with these ``settings``; empty if it was not in the sweep."""
        return self.rows.get(settings, self.trials if self.settings == settings else [])


PLANNER = "planner"  # a field beside a candidate's: the planner of search.planners that made the plan, or none
_sweep_adapter = TypeAdapter(SweepRecord)


def candidate_in(fields: Mapping[str, Any]) -> Candidate:
    """The Candidate among the ``fields`` that a SweepRecord has of a trial."""
    return Candidate(**{name: value for name, value in fields.items() if name != PLANNER})


def trials_of(recipe: LoadedRecipe, plans: Sequence[Plan]) -> list[Trial]:
    """The trials of ``plans``. A name has the degrees, and a digest of everything that affects the measurement."""
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
        around = surroundings | ({"engine": peer} if (peer := engine_version(plan.engine)) else {})
        name = _name(plan, _digest([measured, around, plan.to_json()]))
        trials.append(Trial(name, recipe_folder(recipe) / "trials" / name, plan, recipe))
    return trials


def again(trial: Trial, number: int) -> Trial:
    """The ``number``-th trial of the plan whose first trial is ``trial``; each trial is stored and runs once."""
    if number == 1:
        return trial
    name = f"{trial.name}-{number}"
    return replace(trial, name=name, folder=trial.folder.with_name(name))


def training_of(recipe: LoadedRecipe, plan: Plan, *, sought: bool = False) -> Trial:
    """The training of ``recipe`` under ``plan``.

    It shares checkpoints with every plan with which ``recipe`` learns the same: its name begins with their folder's.
    If the order of ``plan`` was ``sought`` for the recipe's own plan, its name is the same for every order that may be
    found: another process would find another.
    """
    checkpoints = checkpoints_of(recipe, global_batch=plan.global_batch, seed=plan.seed)
    if sought:
        assert recipe.values.plan is not None
        digest = _digest([asdict(recipe.values.plan), plan.graph])
    else:
        digest = _digest(plan.to_json())
    name = f"{checkpoints.name}-{_name(plan, digest)}"
    return Trial(name, recipe_folder(recipe) / "trials" / name, plan, recipe, checkpoints=checkpoints)


def checkpoints_of(recipe: LoadedRecipe, *, global_batch: int, seed: int) -> Path:
    """The folder of the checkpoints of ``recipe``'s training under any plan.

    Its name has a digest of everything that affects what is learnt.
    """
    learnt = _measured(recipe)
    for group in ("cluster", "measure", "emulation"):
        del learnt[group]
    del learnt["model"]["tensor_parallel"]  # it affects which plan is made
    for name in ("threads_per_rank", "compile", "offload_optimizer"):  # they affect only how it is computed
        learnt["training"].pop(name, None)
    if recipe.values.training.learning_rate_schedule != "constant":
        learnt["iterations"] = recipe.values.training.iterations
    digest = _digest([learnt, _files(recipe), global_batch, seed])
    return recipe_folder(recipe) / "checkpoints" / f"train-{digest[:8]}"


def same_training(trial: Trial, names: Iterable[str]) -> list[str]:
    """The trials among ``names`` that are the training ``trial`` under any plan: they share its checkpoints."""
    assert trial.checkpoints is not None
    return [name for name in names if name.startswith(f"{trial.checkpoints.name}-")]


def _name(plan: Plan, digest: str) -> str:
    chosen = {name: getattr(plan, name) for name, axis in AXES.items() if axis.tag}
    tags = "".join(f"-{AXES[name].tag.format(value)}" for name, value in chosen.items() if value != AXES[name].default)
    engine = "" if plan.engine == AUTO3D else f"{plan.engine.replace(':', '-').replace('=', '')}-"
    return f"{engine}dp{plan.dp}-tp{plan.tp}{tags}-pp{plan.pp}-mb{plan.micro_batch_size}-{plan.schedule}-{digest[:8]}"


def _files(recipe: LoadedRecipe) -> list[tuple[str, int, int]]:
    """The files that the recipe reads, also those in folders, with their sizes and times of modification (ns)."""
    weights = recipe.values.model.weights
    files = [*data_files(recipe.values), *([] if weights is None else weight_files(weights))]
    if recipe.values.data.tokenizer is not None:
        files.append(recipe.values.data.tokenizer)
    paths = []
    for path in (Path(file).resolve() for file in files):
        inside = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        index = path.with_suffix(".idx")  # Megatron-LM has it beside the .bin
        paths += [*inside, *([index] if path.suffix == ".bin" and index.is_file() else [])]
    return [(str(file), (state := os.stat(file)).st_size, state.st_mtime_ns) for file in paths]


def weight_files(weights: str) -> list[str]:
    """The files of ``model.weights``, which is one file, or a folder of weights and of their configuration."""
    folder = Path(weights)
    if not folder.is_dir():
        return [weights]
    return [str(file) for file in sorted(folder.iterdir()) if file.suffix in (".safetensors", ".json")]


def manifest_of(recipe: LoadedRecipe) -> Manifest:
    """The manifest of all trials of ``recipe``."""
    return Manifest(recipe_folder(recipe) / "manifest.jsonl")


def job_folder(recipe: LoadedRecipe, submission: str) -> Path:
    """The folder for the sbatch script, the pickled calls and the log files of a submission to SLURM."""
    return (recipe_folder(recipe) / "jobs" / submission).resolve()


def log_folder(recipe: LoadedRecipe, trial: str) -> Path:
    """The folder of the log files of a trial on this machine; log files of a SLURM job are in its ``job_folder``."""
    return recipe_folder(recipe) / "trials" / trial / "job"


def log_files(recipe: LoadedRecipe, entry: Entry) -> list[Path]:
    """The log files of the trial's start ``entry``; for a SLURM job one pair per task, the first node's first."""
    if entry.job:
        files = job_folder(recipe, entry.submission).glob(f"{entry.job}_*_log.*")
    else:
        files = log_folder(recipe, entry.trial).glob("*_log.*")
    return sorted(files, key=lambda file: (int(file.name.split("_")[-2]), file.suffix))


@dataclass(frozen=True)
class ItemRun:
    """What `paper --run` measures, and where it writes."""

    item: str  # its name, or the path of its file
    only: list[str]  # labels of the settings and systems that are measured; empty: all
    output: str


@dataclass(frozen=True)
class Command:
    """The last command on a recipe, for `resume`."""

    verb: str
    overrides: list[str]
    plan_file: str | None = None  # --plan of a training
    trials: list[str] = field(default_factory=list)  # names: the trials that a tune chose so far, or the training
    item: ItemRun | None = None  # what `paper --run` measures


_command_adapter = TypeAdapter(Command)


def write_command(recipe: LoadedRecipe, command: Command) -> None:
    """Record the ``command`` that runs now."""
    write_whole(private_folder(recipe_folder(recipe)) / "command.json", dumps(asdict(command)))


def last_command(recipe: LoadedRecipe) -> Command | None:
    """The last command on the recipe; None if there is none or its record cannot be read."""
    try:
        return _command_adapter.validate_json((recipe_folder(recipe) / "command.json").read_bytes())
    except (OSError, ValidationError):
        return None


def write_sweep(recipe: LoadedRecipe, sweep: SweepRecord) -> None:
    """Record the ``sweep`` that runs now in the store of ``recipe``."""
    write_whole(private_folder(recipe_folder(recipe)) / "sweep.json", dumps(asdict(sweep), indent=1))


def last_sweep(recipe: LoadedRecipe) -> SweepRecord | None:
    """The last sweep of the recipe of this name, with any settings; None if its record is missing or unreadable."""
    try:
        return _sweep_adapter.validate_json((recipe_folder(recipe) / "sweep.json").read_bytes())
    except (OSError, ValidationError):
        return None


def measurements_of(recipe: LoadedRecipe, sweep: SweepRecord) -> list[Measurement]:
    """The measurements of the trials of ``sweep`` that have ended."""
    measurements = (measurement_of(recipe, name) for name in sweep.trials)
    return [measurement for measurement in measurements if measurement is not None]


def measurement_of(recipe: LoadedRecipe, trial: str) -> Measurement | None:
    """The measurement of the trial of that name, or None if it has not ended."""
    return _read_measurement(recipe_folder(recipe) / "trials" / trial / "measurement.json")


_LATER = ("planners", "subgraphs", "rannc_blocks", "rannc_smallest_micro_batch", "amp_mesh", "amp_cooling")
"""Keys of ``search`` that were not always there: with their defaults, earlier sweeps are the same sweeps."""
_SEARCH = SearchRecipe()


def settings_digest(recipe: LoadedRecipe) -> str:
    """A digest that is equal for recipes whose sweeps have the same trials on one machine."""
    values, search = recipe.values, asdict(recipe.values.search)
    for name in _LATER:
        if search[name] == getattr(_SEARCH, name):
            del search[name]
    return _digest([_measured(recipe), search, asdict(values.prediction), values.cluster.memory_gib])


def trial_settings(recipe: LoadedRecipe) -> str:
    """A digest that is equal for recipes whose trials of one plan measure the same."""
    return _digest(_measured(recipe))


def _measured(recipe: LoadedRecipe) -> dict[str, Any]:
    """The recipe's values that affect what a trial measures."""
    values = asdict(recipe.values)
    measured = {group: values[group] for group in ("model", "data", "cluster", "training", "emulation", "measure")}
    del measured["training"]["iterations"]  # only `auto3d train` reads it; a trial has measure.iterations
    for name in (
        "timeout_s",
        "checkpoint_every",
        "checkpoint_keep",
        "check_capture",
        "log_every",
        "report_to",
        "trace",
    ):
        del measured["training"][name]
    if not values["measure"]["communication"]:
        del measured["measure"]["communication"]  # trials from before there was this key are the same trials
    del measured["cluster"]["memory_gib"]  # it affects which plans are tried, not what a plan does
    return measured


def _slurm_nodes(recipe: LoadedRecipe) -> list[str | None]:
    """The keys that select the kind of node on which SLURM runs a trial, and its container."""
    launch = recipe.values.launch
    names = ("partition", "constraint", "gres", "gpus_per_node", "nodelist", "container", "container_image")
    return ["SLURM", *(getattr(launch, name) for name in names)]


def _digest(content: Any) -> str:
    return sha256(dumps(content, sort_keys=True).encode()).hexdigest()


def recipe_folder(recipe: LoadedRecipe) -> Path:
    """The folder in runs/ of everything that ran of ``recipe``."""
    return RUNS / recipe.name


def _read_measurement(file: Path) -> Measurement | None:
    try:
        measurement = Measurement.from_json(file.read_bytes())
    except (OSError, ValidationError):  # an absent, damaged or incompatible file counts as not run
        return None
    # A training that continues from its last checkpoint has no iterations left, so its lists are empty.
    has_iterations = bool(measurement.iteration_s or measurement.first_iteration)
    has_memory = bool(measurement.peak_bytes or measurement.emulated)
    damaged = measurement.status is Status.OK and not (has_iterations and has_memory)
    return None if damaged else measurement


@contextmanager
def exclusive(recipe: LoadedRecipe, training: Trial | None = None) -> Iterator[None]:
    """A lock on the recipe's store, or on the checkpoints of one ``training``.

    Raises StoreError if another process holds it. The kernel releases it however this process ends.
    """
    name = "" if training is None or training.checkpoints is None else f"{training.checkpoints.name}."
    file = private_folder(recipe_folder(recipe)) / f"{name}lock"
    with file.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = f"another sweep of {recipe.name} is running" if training is None else "this training is running"
            raise StoreError(f"{file}: {holder} (process {lock.read()})") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def in_use(recipe: LoadedRecipe) -> bool:
    """Whether a process of this machine is running trials of the recipe."""
    try:
        with (recipe_folder(recipe) / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
