"""A driver in the background: the same command again, as a process that outlives this terminal, printing to a file."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from launch.recipe.load import LoadedRecipe
from launch.store.files import private_folder, write_whole
from launch.store.trials import StoreError, recipe_folder, write_command


@dataclass(frozen=True)
class Driver:
    """A process, with what tells it from another that has its number later."""

    host: str
    pid: int
    started: str  # as /proc/PID/stat has it


_adapter = TypeAdapter(Driver)


def start_driver(
    recipe: LoadedRecipe,
    verb: str,
    options: Sequence[str],
    *,
    plan_file: str | None = None,
    trials: Sequence[str] = (),
) -> tuple[int, Path]:
    """Start ``verb`` on ``recipe`` in the background; returns its process and the file that it prints to.

    Raises StoreError if there is one already, for `cancel` and `resume` know of one.
    """
    if (present := driver_of(recipe)) is not None:
        told = f"process {present.pid} runs trials of it in the background; to end it: {recipe.follow_up('cancel')}"
        raise StoreError(f"{recipe.name}: {told}")
    folder = private_folder(recipe_folder(recipe))
    write_command(recipe, verb, plan_file, trials=trials)  # so that status and resume know of it from now on
    log = folder / "driver.log"
    command = [sys.executable, "-m", "launch.main", verb, recipe.written, *recipe.overrides, *options]
    with log.open("a") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )
    driver = Driver(os.uname().nodename, process.pid, _start_of(process.pid))
    write_whole(folder / "driver.json", dumps(asdict(driver)))
    return process.pid, log


def end_driver(recipe: LoadedRecipe) -> int | None:
    """Ask the background driver of ``recipe`` on this machine to end, if one runs; returns its process."""
    driver = driver_of(recipe)
    if driver is not None:
        os.kill(driver.pid, signal.SIGTERM)
    return None if driver is None else driver.pid


def driver_of(recipe: LoadedRecipe) -> Driver | None:
    """The background driver of ``recipe`` that runs on this machine, if one does."""
    try:
        driver = _adapter.validate_json((recipe_folder(recipe) / "driver.json").read_bytes())
    except (OSError, ValidationError):
        return None
    here = driver.host == os.uname().nodename
    return driver if here and driver.started and _start_of(driver.pid) == driver.started else None


def _start_of(pid: int) -> str:
    """When the process started, in ticks of the machine; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]
