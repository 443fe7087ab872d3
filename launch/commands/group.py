"""What all commands share: the group that they are in, the arguments of a recipe, the two consoles."""

from collections.abc import Callable

import click
from rich.console import Console

RUN_FAILED = 1


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich calls this where it caught a BrokenPipeError, and would exit by itself


PLAIN = {"markup": False, "soft_wrap": True}
out = _Console(highlight=False)
err = _Console(stderr=True, highlight=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(package_name="auto3d", message="auto3d %(version)s")
@click.pass_context
def cli(context: click.Context) -> int:
    """Find, run and tabulate the fastest way to train a model with data, tensor and pipeline parallelism.

    RECIPE is the name of a file of recipes/, or a path to a .yaml file. OVERRIDES change keys of it, in any order,
    as in cluster=a100-80g cluster.nodes=2 training.betas[1]=0.95; `auto3d keys` lists all keys. No key is given twice.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
    return 0


def recipe_command(function: Callable) -> Callable:
    """A command with the arguments that all commands on a recipe share."""
    function = click.argument("overrides", nargs=-1)(function)
    function = click.argument("recipe")(function)
    return cli.command(name=function.__name__.rstrip("_"))(function)
