"""`auto3d calibrate`."""

from typing import Any

import click

from launch.commands.consoles import err
from launch.commands.options import EXISTING_FILE, recipe_command
from launch.console.calibrate import print_calibration
from launch.recipe.load import load


@recipe_command
@click.option(
    "--measurements",
    "file",
    required=True,
    type=EXISTING_FILE,
    help="A CSV file as `auto3d predict` takes it, with measured times.",
)
@click.option(
    "--parameter",
    "parameters",
    multiple=True,
    help="A parameter to fit, such as launch_s; may be repeated. [all compute parameters]",
)
@click.option(
    "--folds", type=click.IntRange(min=2), default=5, show_default=True, help="Number of folds of the cross-validation."
)
@click.option("--json", "as_json", is_flag=True, help="Print one record with every error.")
def calibrate(recipe: str, overrides: tuple[str, ...], **options: Any) -> int:
    """Fit the parameters of RECIPE's cluster to measured iteration times.

    It prints the fitted parameters and the error of the fit. The file has the columns that `auto3d predict` takes, and
    measured_s or measured_ms.
    """
    print_calibration(load(recipe, overrides), **options, progress=err)
    return 0
