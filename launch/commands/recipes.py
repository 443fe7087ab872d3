"""`auto3d recipes`."""

from dataclasses import asdict

import click
from rich.markup import escape
from rich.table import Table

from launch.commands.consoles import note, out
from launch.console.output import print_json
from launch.recipe.shipped import copy_shipped, shipped_recipes


@click.command()
@click.option("--copy", "names", multiple=True, metavar="NAME",
              help="Copy this recipe to recipes/ of this folder; slurm: the scripts for sbatch.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print a list of records.")
def recipes(names: tuple[str, ...], as_json: bool) -> int:
    """List the recipes that come with auto3d, or copy some to this folder.

    A file in recipes/ of this folder comes before one of the same name that comes with auto3d. NAME may also be a file
    that recipes name, such as models/gpt2-tiny or clusters/h100.
    """
    for name in names:
        for copy in copy_shipped(name):
            note(f"written: {copy}")
    if names:
        return 0
    shipped = shipped_recipes()
    if as_json:
        print_json([asdict(recipe) for recipe in shipped])
    elif not out.is_terminal:
        for recipe in shipped:
            print(recipe.name, recipe.about, sep="\t")
    else:
        table = Table()
        table.add_column("recipe", no_wrap=True)
        table.add_column("what it is", overflow="fold")
        for recipe in shipped:
            table.add_row(recipe.name, escape(recipe.about))
        out.print(table)
    return 0
