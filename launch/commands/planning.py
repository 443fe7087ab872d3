"""Commands that only capture, plan and predict; of these, profile alone runs anything."""

from typing import Any

import click

from launch.commands.group import err, recipe_command
from launch.recipe.load import load

_COUNT = click.IntRange(min=1)
_EXISTING = click.Path(exists=True, dir_okay=False)


@recipe_command
@click.option("--json", "as_json", is_flag=True, help="Print one record, in seconds and bytes, with the best plans.")
@click.option("--all", "show_all", is_flag=True, help="A line for every candidate, not for the best twenty.")
def plan(recipe: str, overrides: tuple[str, ...], as_json: bool, show_all: bool) -> int:
    """Search RECIPE's space for the fastest plan by prediction, and say why it is best. Trains nothing.

    search.algorithm is annealing, random, megatron, exhaustive or rannc; search.candidates and search.seconds are its
    budget.
    """
    loaded = load(recipe, overrides)
    from launch.console.progress import search_progress
    from launch.console.ranking import print_plans
    from launch.model.search import search_recipe

    with search_progress(err) as tell:
        search = search_recipe(loaded, tell)
    print_plans(loaded, search, as_json=as_json, show_all=show_all)
    return 0


@recipe_command
@click.option("--micro-batch-size", type=_COUNT, help="Samples. [that of the recipe's plan, else 1]")
@click.option("--subgraphs", type=_COUNT, help="Into how many to shard. [as many as there can be]")
@click.option("--fresh", is_flag=True, help="Capture it again, whatever the cache holds.")
@click.option(
    "--check",
    is_flag=True,
    help="Run one micro-batch, if it is small, and compare loss and gradients with the model's own.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one record, in seconds and bytes.")
def capture(recipe: str, overrides: tuple[str, ...], **options: Any) -> int:
    """Capture RECIPE's model without memory: its size, FLOPs, operations and subgraphs; what that took."""
    loaded = load(recipe, overrides)
    from launch.console.capture import print_capture

    print_capture(loaded, **options)
    return 0


@recipe_command
@click.option("--method", default="autopipe", show_default=True, help="How to choose the stages.")
@click.option("--stages", type=_COUNT, help="How many; rannc finds that itself.")
@click.option("--subgraphs", type=_COUNT, help="Into how many to shard first. [as many as there can be]")
@click.option("--micro-batch-size", type=_COUNT, help="Samples. [that of the recipe's plan, else 1]")
@click.option(
    "--memory-gib", type=click.FloatRange(min=0, min_open=True), help="Of a device. [that of the recipe's cluster]"
)
@click.option("--fresh", is_flag=True, help="Capture the model again, whatever the cache holds.")
@click.option("--json", "as_json", is_flag=True, help="Print one record, in seconds and bytes.")
@click.option("--svg", type=click.Path(dir_okay=False), help="Write a picture.")
@click.option("--plan", "plan_file", type=click.Path(dir_okay=False), help="Write the plan, for `auto3d train --plan`.")
def partition(recipe: str, overrides: tuple[str, ...], **options: Any) -> int:
    """Cut RECIPE's model into stages and tell what is in each, as in: auto3d partition tiny --stages 4."""
    loaded = load(recipe, overrides)
    from launch.console.partition import print_partition

    print_partition(loaded, **options)
    return 0


@recipe_command
@click.option("--candidates", "file", required=True, type=_EXISTING, help="A CSV file with a row for each.")
@click.option("--out", "out_file", type=click.Path(dir_okay=False), help="Write its rows with what is predicted.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of records, in seconds and bytes.")
def predict(recipe: str, overrides: tuple[str, ...], **options: Any) -> int:
    """Predict seconds per iteration and peak bytes of each configuration in a CSV file; runs nothing.

    Its columns are micro_batch_size, tp, dp and pp and, where they are there, partition_cuts, schedule (as in
    interleaved-1f1b:chunks=2), recompute, and keys of the recipe, such as model.config.n_layer.
    """
    loaded = load(recipe, overrides)
    from launch.console.predict import print_predictions

    print_predictions(loaded, **options)
    return 0


@recipe_command
@click.option("--measurements", "file", required=True, type=_EXISTING, help="A CSV file as of predict, with times.")
@click.option("--parameter", "parameters", multiple=True, help="To fit, such as launch_s; may be repeated. [compute]")
@click.option("--folds", type=click.IntRange(min=2), default=5, show_default=True, help="To cross-validate in.")
@click.option("--json", "as_json", is_flag=True, help="Print one record with every error.")
def calibrate(recipe: str, overrides: tuple[str, ...], **options: Any) -> int:
    """Fit the physical parameters of RECIPE's cluster to measured iterations, and say the error.

    The file has the columns of predict, and measured_s or measured_ms.
    """
    loaded = load(recipe, overrides)
    from launch.console.calibrate import print_calibration

    print_calibration(loaded, **options, progress=err)
    return 0


@recipe_command
@click.option("--json", "as_json", is_flag=True, help="Print one record, in seconds and bytes.")
def profile(recipe: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Measure this machine for RECIPE, for the predictions of its cluster: writes profiles/<cluster>.json and .svg.

    It runs a process for each device of one node: each distinct subgraph of the model at several micro-batch sizes,
    alone and while all compute, messages, all-reduces, and the optimizer's update.
    """
    loaded = load(recipe, overrides)
    from launch.model.profile import print_profile

    print_profile(loaded, err, as_json=as_json)
    return 0
