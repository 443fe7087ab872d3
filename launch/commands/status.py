"""`auto3d status`."""

import click

from launch.commands.consoles import err
from launch.commands.options import recipe_command
from launch.drivers.status import standings, status_summary, status_table, watch
from launch.papers.stored import loaded_run


@recipe_command
@click.option("--watch", "watched", is_flag=True, help="Print each change until no trial is running or pending.")
def status(recipe: str, overrides: tuple[str, ...], watched: bool) -> int:
    """Show the state of the trials of RECIPE's last sweep or tune.

    A trial is done, running, waiting for its nodes, or lost.
    """
    loaded = loaded_run(recipe, overrides)
    states = watch(loaded, err) if watched else standings(loaded)
    print(f"{status_table(states)}\n\n{status_summary(states)}")
    return 0
