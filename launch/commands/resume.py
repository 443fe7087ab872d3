"""`auto3d resume`."""

from launch.commands.options import recipe_command
from launch.commands.sweep import sweep_on
from launch.commands.tune import tune_on
from launch.drivers.status import resumed, trained_here
from launch.drivers.sweep import Retry
from launch.executors.submit import cancel_listed_again
from launch.papers.stored import loaded_run
from launch.slurm.executor import check_reachable, on_slurm


@recipe_command
def resume(recipe: str, overrides: tuple[str, ...]) -> int:
    """Continue RECIPE's last sweep, tune or detached training.

    It follows trials that are running, and runs those that are missing or failed. A trial that failed or timed out is
    started at most launch.attempts times; a training continues from its newest checkpoint. A job that SLURM requeued
    although its trial has ended is cancelled. The name paper-ITEM stands for `auto3d paper ITEM --run`. OVERRIDES, if
    given, replace those of that command.
    """
    loaded, command = resumed(loaded_run(recipe, overrides))
    check_reachable(loaded)
    if on_slurm(loaded):
        cancel_listed_again(loaded)
    if command.item is not None:
        from launch.commands.paper import run_item

        return run_item(command.item, overrides or command.overrides, Retry.UP_TO_A_LIMIT)
    if command.verb == "train":
        from launch.commands.train import train_on  # it imports torch, which a sweep of days does without

        if not overrides and trained_here(loaded, command):
            print(f"done already; to train anew: {loaded.command('train', '--fresh')}")
            return 0
        return train_on(loaded, command.plan_file)
    return (tune_on if command.verb == "tune" else sweep_on)(loaded, Retry.UP_TO_A_LIMIT)
