"""`auto3d paper`."""

from pathlib import Path

import click

from launch.commands.consoles import err
from launch.console.progress import sweep_progress
from launch.papers.item import file_of, names, read_item

RESULTS = Path("results/papers")


@click.command()
@click.argument("items", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Make all items.")
@click.option("--list", "listing", is_flag=True, help="List the items; make none.")
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help=f"Write here. [{RESULTS}]"
)
def paper(items: tuple[str, ...], every: bool, listing: bool, output: Path) -> int:
    """Make tables and figures of papers again, and compare them.

    ITEMS are files of recipes/papers/, such as merak-fig10a. Each gives a Markdown page, two CSV files and a plot, and
    its claims join those of the others in README.md.
    Predicted rows need no devices; emulated and measured ones run here, scaled down.
    """
    if listing:
        for name in names():
            item = read_item(file_of(name))
            click.echo(f"{name}\t{item.paper}, {item.place}: {item.title}")
        return 0
    chosen = names() if every else items
    if not chosen:
        raise click.UsageError(f"name an item, or give --all; there are {', '.join(names())}")
    read = {name: read_item(file_of(name)) for name in chosen}  # all, before the first is made
    # These imports load torch, which takes seconds, so a list is printed and a bad item refused before them.
    from launch.papers.make import make_item
    from launch.papers.write import write_index, write_item

    for name, item in read.items():
        with sweep_progress(err) as watcher:
            made = make_item(name, item, file_of(name), watcher)
        for file in write_item(name, item, made, output):
            click.echo(file)
    shipped = {name: read[name] if name in read else read_item(file_of(name)) for name in names()}
    click.echo(write_index(shipped, output))
    return 0
