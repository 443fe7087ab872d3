"""What sweep, tune and train share: running in the background, being interrupted, and saying how to go on."""

from collections.abc import Sequence

from auto3d.runtime.measurement import Measurement
from auto3d.words import counted
from launch.commands.consoles import note
from launch.commands.exit_codes import INTERRUPTED, complain
from launch.drivers.background import start_driver
from launch.drivers.sweep import check_place
from launch.recipe.load import LoadedRecipe
from launch.slurm.executor import on_slurm
from launch.store.watcher import FINAL


def run_in_background(
    recipe: LoadedRecipe, verb: str, *options: str, plan_file: str | None = None, trials: Sequence[str] = ()
) -> int:
    """Start ``verb`` again as a process that outlives this terminal, and print how to follow it."""
    check_place(recipe, verb)
    pid, log = start_driver(recipe, verb, options, plan_file=plan_file, trials=trials)
    print(f"process {pid} runs in the background and prints to {log}\n{next_commands(recipe)}")
    return 0


def next_commands(recipe: LoadedRecipe) -> str:
    """The commands that follow, end and resume what was started: a line per command, with its meaning."""
    meanings = {
        ("status", "--watch"): "show the state of its trials until all have ended",
        ("logs", "TRIAL", "-f"): "show the output of one trial",
        ("cancel",): "end everything that is running or pending",
        ("resume",): "follow the trials, run what is missing or failed, and print the table",
    }
    commands = {recipe.follow_up(verb, *options): meaning for (verb, *options), meaning in meanings.items()}
    width = max(map(len, commands))
    return "\n".join(f"  {command:{width}}  # {meaning}" for command, meaning in commands.items())


def interrupted(recipe: LoadedRecipe) -> int:
    """Say what an interrupt leaves behind; returns the exit code."""
    if on_slurm(recipe):
        note(f"interrupted; jobs of SLURM go on:\n{next_commands(recipe)}")
        return INTERRUPTED
    return complain("interrupted; finished trials are kept, and the same command runs the rest", INTERRUPTED)


def print_failed(recipe: LoadedRecipe, verb: str, measurements: Sequence[Measurement]) -> None:
    """Say how many of ``measurements`` have failed or timed out, if any, and how to run these trials again."""
    if failed := sum(measurement.status not in FINAL for measurement in measurements):
        retry = recipe.command(verb, "--retry")
        note(f"{counted(failed, 'trial')} failed or timed out; to run again: {retry}")
