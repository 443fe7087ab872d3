"""`auto3d capture`: prints the figures of a recipe's model."""

from dataclasses import asdict
from typing import Any

from tabulate import tabulate

from launch.console.output import print_json
from launch.model.capture_figures import CaptureFigures, capture_figures
from launch.recipe.load import LoadedRecipe


def print_capture(recipe: LoadedRecipe, *, as_json: bool, **options: Any) -> None:
    """Capture the recipe's model and print its figures; ``options`` are those of ``capture_figures``."""
    figures = capture_figures(recipe, **options)
    if as_json:
        print_json({name: value for name, value in asdict(figures).items() if name != "check" or value is not None})
    else:
        print(_table(figures))


def _table(figures: CaptureFigures) -> str:
    common = ", ".join(f"{name} ({users})" for name, users in figures.common.items())
    inputs = ", ".join(f"{name} ({subgraph})" for name, subgraph in figures.first_user.items())
    source = "from the cache" if figures.cached else "captured"
    rows = [
        ("parameters", f"{figures.parameters:,}"),
        ("", f"{figures.parameter_bytes / 2**30:.3g} GiB"),
        ("forward", f"{figures.flops / 1e12:.4g} TFLOP per micro-batch of {figures.micro_batch_size}"),
        ("backward", f"{figures.backward_flops / 1e12:.4g} TFLOP"),
        ("operations", f"{figures.operations:,}"),
        ("subgraphs", f"{figures.subgraphs:,}"),
        ("common nodes (users)", common or "none"),
        ("inputs (first subgraph)", inputs),
        ("time taken", f"{figures.seconds:.2f} s, {source}"),
        ("peak memory taken", f"{figures.peak_bytes / 2**20:,.0f} MiB"),
    ]
    if figures.check is not None:
        rows.append(("check", figures.check))
    return tabulate(rows, tablefmt="plain", disable_numparse=True)
