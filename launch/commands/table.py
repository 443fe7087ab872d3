"""`auto3d table`."""

from pathlib import Path

import click

from launch.commands.options import recipe_command
from launch.console import tables
from launch.console.output import print_json
from launch.recipe.load import load


@recipe_command
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print a list of records, in seconds and bytes, each with its plan and its error; write no file.",
)
@click.option("--latex", is_flag=True, help="Write table.tex, too, for a document that loads the package booktabs.")
@click.option(
    "--baseline",
    default="",
    metavar="'KEY=VALUE ...'",
    help="Add the speed-up over the row with these values, as in 'dp=1 tp=1 pp=1' or 'pp=4 partition=uniform'; "
    "exactly one row must have them.",
)
@click.option("--output", "folder", type=click.Path(file_okay=False), help="Write to this folder. [tables/RECIPE]")
def table(
    recipe: str, overrides: tuple[str, ...], as_json: bool, latex: bool, baseline: str, folder: str | None
) -> int:
    """Print the table of RECIPE's last sweep, fastest first.

    The table is also written to tables/. OVERRIDES, if given, must be those of that sweep.
    """
    results = tables.results_of(load(recipe, overrides), baseline)
    if as_json:
        print_json(tables.rows(results))
        return 0
    files = tables.write(results, None if folder is None else Path(folder), latex=latex)
    print(f"{tables.terminal(results)}\n\nwritten: {', '.join(map(str, files))}")
    return 0
