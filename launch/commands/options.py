"""Arguments and options that several commands share."""

from collections.abc import Callable, Sequence

import click

from launch.commands.consoles import note
from launch.recipe.load import LoadedRecipe, load
from launch.recipe.overrides import read_overrides, write_path

UNREAD = {  # verb -> keys, or groups of them, that change nothing of what it does
    "plan": ("plan", "measure", "launch", "search.max_trials", "search.planners"),
    "sweep": ("plan", "search.trials"),
    "tune": ("plan", "search.max_trials", "search.planners"),
}
COUNT = click.IntRange(min=1)
EXISTING_FILE = click.Path(exists=True, dir_okay=False)
OUTPUT_FILE = click.Path(dir_okay=False)

# Options of the commands that start trials or trainings
retry = click.option("--retry", is_flag=True, help="Run failed and timed-out trials again.")
detach = click.option(
    "--detach", is_flag=True, help="Return as soon as the run has started, and print how to follow it."
)
dry_run = click.option("--dry-run", is_flag=True, help="Print the sbatch text of each job; submit none.")
test_only = click.option("--test-only", is_flag=True, help="Ask SLURM whether it would accept the jobs; submit none.")


def load_for(verb: str, recipe: str, overrides: Sequence[str]) -> LoadedRecipe:
    """The recipe for ``verb``; a line names each of the ``overrides`` that has no effect there."""
    loaded = load(recipe, overrides)
    for path in read_overrides(overrides):
        written = write_path(path)
        if any(written == key or written.startswith(f"{key}.") for key in UNREAD[verb]):
            note(f"{written} has no effect on `auto3d {verb}`")
    return loaded


def recipe_command(function: Callable[..., int]) -> click.Command:
    """A click command, named like ``function``, whose arguments are a recipe and overrides of its keys."""
    function = click.argument("overrides", nargs=-1)(function)
    function = click.argument("recipe")(function)
    return click.command(name=function.__name__)(function)
