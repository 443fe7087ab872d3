"""The command group: ``auto3d``, its verbs, and the help line of each.

The file of a verb is imported when that verb is called, so that `auto3d --help` and each quick verb start quickly.
"""

from importlib import import_module

import click

VERBS = {  # verb -> its line in `auto3d --help`; launch/commands/VERB.py defines the click command of that name
    "calibrate": "Fit the parameters of RECIPE's cluster to measured iteration times.",
    "cancel": "End RECIPE's running and pending trials, or only TRIAL.",
    "capture": "Capture RECIPE's model without allocating its memory, and print its figures.",
    "doctor": "Check what trials need, and say how to mend each fault.",
    "export": "Write the weights of RECIPE's training to the new folder OUT, for from_pretrained.",
    "keys": "List every key of a recipe: its default, what it takes, and what it means.",
    "logs": "Print the output of TRIAL and how it ended.",
    "paper": "Make tables and figures of papers again, and compare them.",
    "partition": "Cut RECIPE's model into stages and print them.",
    "plan": "Search for the fastest plan by prediction; train nothing.",
    "predict": "Predict time and peak memory of each configuration in a CSV file.",
    "profile": "Measure this machine with RECIPE's model, for later predictions.",
    "recipes": "List the recipes that come with auto3d, or copy some to this folder.",
    "recompute": "Find how little RECIPE's plan must recompute to fit into memory.",
    "report": "Write one HTML page about RECIPE's last sweep or tune, or about a search.",
    "resume": "Continue RECIPE's last sweep, tune or detached training.",
    "schedule": "Simulate, compare and draw pipeline schedules.",
    "status": "Show the state of the trials of RECIPE's last sweep or tune.",
    "sweep": "Run every plan of RECIPE's search space as a trial.",
    "table": "Print the table of RECIPE's last sweep, fastest first.",
    "train": "Train RECIPE's model.",
    "tune": "Search, try the best candidates, and write the fastest plan.",
    "yardstick": "Score predictors of time and memory on published runs.",
}


class LazyGroup(click.Group):
    """A click group that imports the file of a verb when that verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        return getattr(import_module(f"launch.commands.{cmd_name}"), cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


def print_version(context: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked:
        from launch.commands.version import version_and_commit

        print("auto3d", version_and_commit())
        context.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=print_version,
              help="Show the version, and the commit that it was made from, and exit.")  # fmt: skip
@click.pass_context
def cli(context: click.Context) -> int:
    """Find, run and tabulate the fastest way to train a model with data, tensor and pipeline parallelism.

    RECIPE is the name of a file in recipes/, or the path of a .yaml file. OVERRIDES change its keys, in any order, as
    in cluster=a100-80g cluster.nodes=2 training.betas[1]=0.95; `auto3d keys` lists all keys. Give each key only once.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
    return 0
