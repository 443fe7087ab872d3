"""`auto3d cancel`."""

import click

from auto3d.words import counted
from launch.drivers.background import end_driver
from launch.drivers.status import cancel_trials
from launch.papers.stored import loaded_run


@click.command()
@click.argument("recipe")
@click.argument("trial", required=False)
def cancel(recipe: str, trial: str | None) -> int:
    """End RECIPE's running and pending trials, or only TRIAL.

    `auto3d resume` runs them again.
    """
    loaded = loaded_run(recipe)
    if trial is None and (pid := end_driver(loaded)) is not None:
        print(f"asked process {pid}, which runs trials in the background, to end")
    cancelled = cancel_trials(loaded, trial)
    print(f"cancelled {counted(len(cancelled), 'job')} of SLURM{': ' * bool(cancelled)}{', '.join(cancelled)}")
    return 0
