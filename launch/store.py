"""The result store: one private folder per trial under runs/, each file written whole or not at all."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from json import dumps
from pathlib import Path

from pydantic import ValidationError

from auto3d.errors import InputError
from auto3d.plan import Plan, PlanError
from auto3d.runtime.measurement import Measurement
from launch.recipe import LoadedRecipe, save

RUNS = Path("runs")


class StoreError(InputError):
    """The store is in use, or holds nothing."""


@dataclass(frozen=True)
class Trial:
    """One plan of one recipe, and the folder where its run is kept."""

    name: str
    folder: Path
    plan: Plan

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
        try:
            return Measurement.from_json(self.measurement_file.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:  # of another version, or damaged: as if it had not run
            return None

    def prepare(self, recipe: LoadedRecipe) -> None:
        """Write what the trial's process needs: the plan and the whole recipe."""
        shutil.rmtree(self.folder, ignore_errors=True)  # of an earlier try
        private_folder(self.folder)
        write_whole(self.plan_file, self.plan.to_json())
        save(recipe.values, self.recipe_file)


def trial_of(recipe: LoadedRecipe, plan: Plan) -> Trial:
    """The trial of ``plan``: its name tells the degrees, and changes with all that changes what would be measured."""
    values = asdict(recipe.values)
    identity = {group: values[group] for group in ("model", "data", "cluster", "training", "measure")}
    del identity["training"]["iterations"]  # of `auto3d train`; a trial has its own
    text = dumps([identity, plan.to_json()], sort_keys=True)
    digest = sha256(text.encode()).hexdigest()[:8]
    name = f"dp{plan.dp}-tp{plan.tp}-pp{plan.pp}-mb{plan.micro_batch_size}-{plan.schedule}-{digest}"
    return Trial(name, RUNS / recipe.name / "trials" / name, plan)


def finished_trials(recipe: LoadedRecipe) -> list[tuple[Trial, Measurement]]:
    """The trials of ``recipe``, as it is now, that have ended; those of other settings under its name are left out."""
    found = []
    for folder in sorted((RUNS / recipe.name / "trials").glob("*")):
        try:
            trial = trial_of(recipe, Plan.from_json((folder / "plan.json").read_bytes()))
        except (FileNotFoundError, PlanError):
            continue
        measurement = trial.measurement() if trial.name == folder.name else None
        if measurement is not None:
            found.append((trial, measurement))
    return found


@contextmanager
def exclusive(recipe: LoadedRecipe) -> Iterator[None]:
    """Hold the recipe's store; raises StoreError if another process does. The kernel frees it however we end."""
    file = private_folder(RUNS / recipe.name) / "lock"
    with file.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise StoreError(f"{file}: another sweep of {recipe.name} is running (process {lock.read()})") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def private_folder(path: Path) -> Path:
    """Make ``path``, readable by this user alone: the launcher keeps pickled calls in it."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def write_whole(file: Path, text: str) -> None:
    """Write so that a reader sees the old content or the new, never half of it, even after a crash."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    with partial.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)
