"""The state of the trials of a recipe's last command, from their files, the manifest, and SLURM."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from tabulate import tabulate

from auto3d.errors import InputError
from auto3d.runtime.measurement import Status
from launch.drivers.background import driver_of
from launch.recipe.load import LoadedRecipe, load
from launch.slurm.client import SlurmError
from launch.slurm.jobs import STATES_S, JobState, cancel, job_states
from launch.store.lost_jobs import find_lost
from launch.store.manifest import WITH_ALL, Entry, History, Manifest, State, histories, names_of_jobs
from launch.store.trials import (
    Command,
    StoreError,
    in_use,
    last_command,
    last_sweep,
    log_files,
    manifest_of,
    measurement_of,
)

WATCH_S = 5.0
FOLLOW_S = 0.5
UNDER_WAY = ("pending", "running")


@dataclass(frozen=True)
class Standing:
    """The state of one trial: the status of its measurement or, until there is a measurement, the state of its job."""

    trial: str
    state: str
    job: str = ""
    starts: int = 0
    iteration_s: float | None = None

    @property
    def under_way(self) -> bool:
        return self.state.split()[0] in UNDER_WAY


def resumed(recipe: LoadedRecipe) -> tuple[LoadedRecipe, Command]:
    """``recipe`` and its last command; a recipe without overrides gets the overrides of that command."""
    command = _last_command(recipe)
    return (recipe if recipe.overrides or command.item else load(recipe.written, command.overrides)), command


def _last_command(recipe: LoadedRecipe) -> Command:
    command = last_command(recipe)
    if command is None:
        raise StoreError(f"{recipe.name}: nothing has run in this folder; to run it: {recipe.command('sweep')}")
    return command


def trained_here(recipe: LoadedRecipe, command: Command) -> bool:
    """Whether the training of that ``command`` has ended successfully on this machine, without SLURM."""
    known = histories(manifest_of(recipe).entries())
    last = [known[name].last for name in command.trials if name in known]
    return any(entry.state is State.ENDED and not entry.job and entry.told == Status.OK for entry in last)


def standings(recipe: LoadedRecipe) -> list[Standing]:
    """The states of the trials of the last sweep, of the trials that the last tune chose so far, or of the training."""
    known = histories(manifest_of(recipe).entries())
    sweep, command = last_sweep(recipe), _last_command(recipe)
    names = sweep.trials if command.verb in ("sweep", "paper") and sweep is not None else command.trials
    measured = {name: measurement_of(recipe, name) for name in names}
    unmeasured = [known[name].last for name in names if measured[name] is None and name in known]
    try:
        states = job_states(names_of_jobs(unmeasured))
    except SlurmError:
        states = None
    runs_here = in_use(recipe) or driver_of(recipe) is not None
    result = []
    for name in names:
        history, measurement = known.get(name), measured[name]
        job, starts = (history.last.job, history.starts) if history else ("", 0)
        if measurement is not None:
            seconds = measurement.median_s if measurement.iteration_s else None
            result.append(Standing(name, str(measurement.status), job, starts, seconds))
        else:
            result.append(Standing(name, _unfinished(history, states, runs_here), job, starts))
    return result


def _unfinished(history: History | None, states: dict[str, JobState] | None, runs_here: bool) -> str:
    if history is None:
        return "not run"
    last = history.last
    if last.state is State.STARTED:
        return "running" if runs_here else "interrupted"
    if last.state is State.ENDED and not last.job:
        return last.told  # a training on this machine leaves no measurement, only this status
    if last.state is State.SUBMITTING:
        return "unknown (the submitting process may have died; auto3d resume finds out)"
    if not last.job:
        return "not run"
    if states is None:
        return "unknown (SLURM does not answer)"
    state = states.get(last.job)
    if state is None or state.ended:
        return "cancelled" if last.state is State.CANCELLED else f"lost ({state.name if state else 'no such job'})"
    return "running" if state.running else f"pending ({state.why})"


def status_table(states: Sequence[Standing]) -> str:
    """The states as a table, one row per trial."""
    rows = [
        (
            standing.trial,
            standing.state,
            standing.job or "-",
            standing.starts,
            "-" if standing.iteration_s is None else f"{standing.iteration_s:.3f}",
        )
        for standing in states
    ]
    return tabulate(rows, ["trial", "state", "job", "starts", "s per\niteration"], disable_numparse=True)


def status_summary(states: Sequence[Standing]) -> str:
    """The states in one line: how many trials are in each state."""
    counts = Counter(standing.state.split(" (")[0] for standing in states)
    return ", ".join(f"{number} {state}" for state, number in counts.items()) or "no trial"


def watch(recipe: LoadedRecipe, console: Console) -> list[Standing]:
    """Print the summary each time it changes, until no trial is under way; returns the last states."""
    shown = ""
    while True:
        states = standings(recipe)
        if (line := status_summary(states)) != shown:
            shown = line
            console.print(line, markup=False, soft_wrap=True)
        if not any(standing.under_way for standing in states):
            return states
        time.sleep(WATCH_S)


def trial_called(recipe: LoadedRecipe, name: str) -> str:
    """The only trial whose name begins with ``name`` or contains it; raises InputError with all names otherwise."""
    names = list(dict.fromkeys(entry.trial for entry in manifest_of(recipe).entries()))
    for matches in ([trial for trial in names if trial.startswith(name)], [trial for trial in names if name in trial]):
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise InputError(f"trial: {len(matches)} names contain {name!r}: {', '.join(matches)}; give more of one")
    raise InputError(f"trial: no trial is called {name!r}; started trials: {', '.join(names) or 'none'}")


def cancel_trials(recipe: LoadedRecipe, name: str | None) -> list[str]:
    """Cancel the jobs of all trials under way, or only of the trial ``name``; returns the trials' names."""
    manifest = manifest_of(recipe)
    wanted = None if name is None else trial_called(recipe, name)
    with manifest.decided_alone():
        find_lost(manifest, [name for name in histories(manifest.entries()) if wanted in (None, name)])
        last = [history.last for history in histories(manifest.entries()).values()]
        last = [entry for entry in last if wanted in (None, entry.trial)]
        states = job_states(names_of_jobs(last))
        live = [entry for entry in last if entry.job in states and not states[entry.job].ended]
        if live:
            cancel([entry.job for entry in live])
            told = WITH_ALL if name is None else ""
            cancelled = Entry(trial="", state=State.CANCELLED, told=told)
            manifest.append(
                [replace(cancelled, trial=entry.trial, job=entry.job, submission=entry.submission) for entry in live]
            )
    return [entry.trial for entry in live]


def print_logs(recipe: LoadedRecipe, name: str, *, follow: bool) -> None:
    """Print the log files of the trial ``name``, with ``follow`` until it ends, and then how it ended."""
    trial = trial_called(recipe, name)
    manifest = manifest_of(recipe)
    read: dict[Path, int] = {}
    shown: Path | None = None
    asked, ended = -STATES_S, not follow
    while True:
        if follow and (measurement_of(recipe, trial) is not None or time.monotonic() - asked >= STATES_S):
            asked = time.monotonic()
            ended = not _under_way(recipe, manifest, trial)
        for file in log_files(recipe, histories(manifest.entries())[trial].last):
            with suppress(FileNotFoundError), file.open("rb") as stream:
                stream.seek(read.get(file, 0))
                new = stream.read()
                read[file] = stream.tell()
                if new and shown != file:
                    print(f"==> {file} <==")
                    shown = file
                print(new.decode(errors="replace"), end="", flush=True)
        if ended:
            break
        time.sleep(FOLLOW_S)
    if (measurement := measurement_of(recipe, trial)) is not None:
        print(f"==> {measurement.status} <==\n{measurement.error}".rstrip())


def _under_way(recipe: LoadedRecipe, manifest: Manifest, trial: str) -> bool:
    if measurement_of(recipe, trial) is not None:
        return False
    last = histories(manifest.entries())[trial].last
    if not last.job:
        return last.state is State.STARTED and in_use(recipe)
    state = job_states(names_of_jobs([last])).get(last.job)
    return state is not None and not state.ended
