"""A driver in the background: the same command as a process that outlives the terminal and prints to a file."""

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
from launch.store.trials import Command, StoreError, recipe_folder, write_command


@dataclass(frozen=True)
class Driver:
    """A process, with its start time, since another process may get the same id later."""

    host: str
    pid: int
    started: str  # start time in /proc/PID/stat, in clock ticks since boot


_adapter = TypeAdapter(Driver)


def start_driver(
    recipe: LoadedRecipe,
    verb: str,
    options: Sequence[str],
    *,
    plan_file: str | None = None,
    trials: Sequence[str] = (),
) -> tuple[int, Path]:
    """Start the command ``verb`` on ``recipe`` in the background; returns its process id and its log file.

    Raises StoreError if the recipe has a driver already, since `cancel` and `resume` know a single driver.
    """
    if (present := driver_of(recipe)) is not None:
        problem = f"process {present.pid} runs its trials in the background; to end it: {recipe.follow_up('cancel')}"
        raise StoreError(f"{recipe.name}: {problem}")
    folder = private_folder(recipe_folder(recipe))
    command = Command(verb, [*recipe.overrides], plan_file, [*trials])
    write_command(recipe, command)  # from now on status and resume know it
    log = folder / "driver.log"
    words = [sys.executable, "-m", "launch.main", verb, recipe.written, *recipe.overrides, *options]
    with log.open("a") as stream:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )
    driver = Driver(os.uname().nodename, process.pid, _start_of(process.pid))
    write_whole(folder / "driver.json", dumps(asdict(driver)))
    return process.pid, log


def end_driver(recipe: LoadedRecipe) -> int | None:
    """Ask the background driver of ``recipe`` on this machine to end; returns its process id, or None if none runs."""
    driver = driver_of(recipe)
    if driver is not None:
        os.kill(driver.pid, signal.SIGTERM)
    return None if driver is None else driver.pid


def driver_of(recipe: LoadedRecipe) -> Driver | None:
    """The background driver of ``recipe`` on this machine, or None if none runs."""
    try:
        driver = _adapter.validate_json((recipe_folder(recipe) / "driver.json").read_bytes())
    except (OSError, ValidationError):
        return None
    on_this_machine = driver.host == os.uname().nodename
    return driver if on_this_machine and driver.started and _start_of(driver.pid) == driver.started else None


def _start_of(pid: int) -> str:
    """The start time of the process, in clock ticks since boot; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]
