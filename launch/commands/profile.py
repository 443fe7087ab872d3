"""`auto3d profile`."""

import click

from launch.commands.consoles import err
from launch.commands.options import recipe_command
from launch.console.profile import print_profile
from launch.recipe.load import load


@recipe_command
@click.option("--stages", is_flag=True, help="Also run each distinct stage that RaNNC could choose, as its paper does.")
@click.option("--json", "as_json", is_flag=True, help="Print one record, in seconds and bytes.")
def profile(recipe: str, overrides: tuple[str, ...], stages: bool, as_json: bool) -> int:
    """Measure this machine with RECIPE's model, for later predictions.

    It writes profiles/<cluster>.json and .svg, which predictions for that cluster use. It starts one process per device
    of a node and measures each distinct subgraph of the model at several micro-batch sizes, on one rank and while all
    ranks compute, as well as messages, all-reduces and the optimizer's update.
    """
    print_profile(load(recipe, overrides), err, stages=stages, as_json=as_json)
    return 0
