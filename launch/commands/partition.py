"""`auto3d partition`."""

from typing import Any

import click

from launch.commands.options import COUNT, OUTPUT_FILE, recipe_command
from launch.console.partition import print_partition
from launch.recipe.load import load


@recipe_command
@click.option("--method", default="autopipe", show_default=True, help="Method that chooses the stages.")
@click.option("--stages", type=COUNT, help="Number of stages; the method rannc chooses it by itself.")
@click.option("--subgraphs", type=COUNT, help="Number of subgraphs to cut the model into first. [as many as possible]")
@click.option("--micro-batch-size", type=COUNT, help="Samples per micro-batch. [as in the recipe's plan, else 1]")
@click.option(
    "--memory-gib",
    type=click.FloatRange(min=0, min_open=True),
    help="Memory of a device in GiB. [as in the recipe's cluster]",
)
@click.option("--fresh", is_flag=True, help="Capture the model again, even if it is in the cache.")
@click.option("--json", "as_json", is_flag=True, help="Print one record, in seconds and bytes.")
@click.option("--svg", type=OUTPUT_FILE, help="Write a picture of the stages.")
@click.option("--plan", "plan_file", type=OUTPUT_FILE, help="Write the plan, for `auto3d train --plan`.")
def partition(recipe: str, overrides: tuple[str, ...], **options: Any) -> int:
    """Cut RECIPE's model into stages and print them.

    For example: auto3d partition tiny --stages 4.
    """
    print_partition(load(recipe, overrides), **options)
    return 0
