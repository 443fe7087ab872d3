"""`auto3d keys`."""

import json

import click
from rich.markup import escape
from rich.table import Table

from launch.commands.consoles import out
from launch.recipe.keys import documented_keys


@click.command()
def keys() -> int:
    """List every key of a recipe: its default, what it takes, and what it means."""
    if not out.is_terminal:
        for name, default, takes, meaning in documented_keys():
            print(name, json.dumps(default), takes, meaning, sep="\t")
        return 0
    table = Table()
    table.add_column("key", no_wrap=True)
    for heading in ("default", "takes", "meaning"):
        table.add_column(heading, overflow="fold")
    for name, default, takes, meaning in documented_keys():
        table.add_row(name, escape(json.dumps(default)), takes, escape(meaning))
    out.print(table)
    return 0
