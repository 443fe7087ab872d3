"""`auto3d predict`."""

from typing import Any

import click

from launch.commands.options import EXISTING_FILE, OUTPUT_FILE, recipe_command
from launch.console.predict import print_predictions
from launch.recipe.load import load


@recipe_command
@click.option("--candidates", "file", required=True, type=EXISTING_FILE, help="A CSV file with one candidate per row.")
@click.option("--out", "out_file", type=OUTPUT_FILE, help="Write the rows with the predictions added.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of records, in seconds and bytes.")
def predict(recipe: str, overrides: tuple[str, ...], **options: Any) -> int:
    """Predict time and peak memory of each configuration in a CSV file.

    The time is seconds per iteration, the memory bytes; nothing runs. The columns are micro_batch_size, tp, dp and pp,
    and optionally partition_cuts, schedule (as in interleaved-1f1b:chunks=2), recompute, and keys of the recipe, such
    as model.config.n_layer.
    """
    print_predictions(load(recipe, overrides), **options)
    return 0
