"""`auto3d capture`."""

from typing import Any

import click

from auto3d.share import Share
from launch.commands.options import COUNT, recipe_command
from launch.console.capture import print_capture
from launch.recipe.load import load


@recipe_command
@click.option("--micro-batch-size", type=COUNT, help="Samples per micro-batch. [as in the recipe's plan, else 1]")
@click.option("--subgraphs", type=COUNT, help="Number of subgraphs to cut the model into. [as many as possible]")
@click.option("--fresh", is_flag=True, help="Capture the model again, even if it is in the cache.")
@click.option(
    "--check",
    is_flag=True,
    help="Run one micro-batch, if the model is small enough, and compare loss and gradients with the model's own.",
)
@click.option("--tp", type=COUNT, help="Also list what so many tensor-parallel ranks split, keep whole and exchange.")
@click.option("--sequence-parallel", is_flag=True, help="With --tp: with sequence parallelism.")
@click.option("--json", "as_json", is_flag=True, help="Print one record, in seconds and bytes.")
def capture(recipe: str, overrides: tuple[str, ...], **options: Any) -> int:
    """Capture RECIPE's model without allocating its memory, and print its figures.

    The figures are its size, FLOPs, operations and subgraphs, and the time and memory that the capture took.
    """
    if options["sequence_parallel"] and (options["tp"] or 1) < 2:
        raise click.UsageError("--sequence-parallel needs --tp of 2 or more, as in --tp 4 --sequence-parallel")
    tp, sequence_parallel = options.pop("tp"), options.pop("sequence_parallel")
    share = None if tp is None else Share(tp=tp, sequence_parallel=sequence_parallel)
    print_capture(load(recipe, overrides), share=share, **options)
    return 0
