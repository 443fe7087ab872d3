"""`auto3d calibrate`: prints the parameters that fit measured iterations best, and the error of the fit."""

from collections.abc import Sequence

from rich.console import Console
from tabulate import tabulate

from auto3d.cost.calibrate import COMPUTE, calibrate
from launch.console.output import print_json
from launch.console.progress import at_work
from launch.model.calibration import GROUPED, by_group, measurements
from launch.recipe.cluster_schema import FIGURES
from launch.recipe.load import LoadedRecipe

WORST = 10
# parameter -> its key in the file of an accelerator or a cluster, and the factor to that key's unit
WRITTEN = {
    "matrix_efficiency": ("matrix_efficiency", 1.0),
    "half_flops": ("half_gflops", 1e-9),
    **FIGURES,
    "inside.latency_s": ("inside.latency_us", 1e6),
    "inside.bandwidth": ("inside.gbit_per_s", 8e-9),
    "outside.latency_s": ("outside.latency_us", 1e6),
    "outside.bandwidth": ("outside.gbit_per_s", 8e-9),
}


def print_calibration(
    recipe: LoadedRecipe, *, file: str, parameters: Sequence[str], folds: int, as_json: bool, progress: Console
) -> None:
    """Fit ``parameters`` to the rows of ``file`` and print them with their cross-validated errors."""
    planned, measured = measurements(recipe, file)
    with at_work(progress, f"fitting {len(measured)} iterations in {folds} folds"):
        calibration = calibrate(measured, parameters or COMPUTE, folds=folds)
    fitted = {WRITTEN[name][0]: WRITTEN[name][1] * value for name, value in calibration.parameters.items()}
    groups, errors, mean_error = by_group(planned, calibration), calibration.errors, calibration.mean_error
    if as_json:
        print_json({"parameters": fitted, "mean_error": mean_error, "groups": groups, "errors": errors})
        return
    print(tabulate([(name, f"{value:.4g}") for name, value in fitted.items()], ["fitted", "value"]))
    print(f"\nmean error of {len(measured)} iterations, cross-validated in {folds} folds: {mean_error:.2%}")
    rows = [(name, value, f"{error:.1%}", count) for name, value, error, count in groups]
    print(tabulate(rows, ["by", "", "mean error", "iterations"]))
    print("\nlargest errors:")
    worst = sorted(zip(errors, planned, strict=True), key=lambda pair: -abs(pair[0]))[:WORST]
    cells = [(*(iteration.row[name] for name in GROUPED), f"{error:+.1%}") for error, iteration in worst]
    print(tabulate(cells, [*GROUPED, "predicted against measured"]))
