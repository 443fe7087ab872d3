"""`auto3d logs`."""

import click

from launch.drivers.status import print_logs
from launch.papers.stored import loaded_run


@click.command()
@click.argument("recipe")
@click.argument("trial")
@click.option("-f", "--follow", is_flag=True, help="Go on printing until the trial has ended.")
def logs(recipe: str, trial: str, follow: bool) -> int:
    """Print the output of TRIAL and how it ended.

    TRIAL is the trial's name, or any part of it that no other trial has.
    """
    print_logs(loaded_run(recipe), trial, follow=follow)
    return 0
