"""Arguments and options that several commands share."""

from collections.abc import Callable

import click

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


def recipe_command(function: Callable[..., int]) -> click.Command:
    """A click command, named like ``function``, whose arguments are a recipe and overrides of its keys."""
    function = click.argument("overrides", nargs=-1)(function)
    function = click.argument("recipe")(function)
    return click.command(name=function.__name__)(function)
