"""`auto3d calibrate`: fit a recipe's cluster to measured iterations, and say the error."""

from collections.abc import Sequence

from rich.console import Console
from tabulate import tabulate

from auto3d.cost.calibrate import COMPUTE, Calibration, MeasuredIteration, calibrate
from launch.console.output import print_json
from launch.console.predict import Bound, bind, read_candidates
from launch.console.progress import at_work
from launch.recipe.load import LoadedRecipe

SECONDS = {"measured_s": 1.0, "measured_ms": 1e-3}  # columns of measurements
GROUPED = ("tp", "pp", "dp", "micro_batch_size")
WORST = 10
# How the file of an accelerator, or a cluster, writes what was fitted.
WRITTEN = {
    "matrix_efficiency": ("matrix_efficiency", 1.0),
    "half_flops": ("half_gflops", 1e-9),
    "memory_efficiency": ("memory_efficiency", 1.0),
    "launch_s": ("launch_us", 1e6),
    "collective_launch_s": ("collective_launch_us", 1e6),
    "micro_batch_s": ("micro_batch_us", 1e6),
    "iteration_s": ("iteration_ms", 1e3),
    "inside.latency_s": ("inside.latency_us", 1e6),
    "inside.bandwidth": ("inside.gbit_per_s", 8e-9),
    "outside.latency_s": ("outside.latency_us", 1e6),
    "outside.bandwidth": ("outside.gbit_per_s", 8e-9),
}


def print_calibration(
    recipe: LoadedRecipe, *, file: str, parameters: Sequence[str], folds: int, as_json: bool, progress: Console
) -> None:
    """Fit ``parameters`` to the rows of ``file`` and print them with their cross-validated errors."""
    bound, measured = measurements(recipe, file)
    with at_work(progress, f"fitting {len(measured)} iterations in {folds} parts"):
        found = calibrate(measured, parameters or COMPUTE, folds=folds)
    fitted = {WRITTEN[name][0]: WRITTEN[name][1] * value for name, value in found.parameters.items()}
    groups = by_group(bound, found)
    if as_json:
        print_json({"parameters": fitted, "mean_error": found.mean_error, "groups": groups, "errors": found.errors})
        return
    print(tabulate([(name, f"{value:.4g}") for name, value in fitted.items()], ["fitted", "value"]))
    print(
        f"\nerror, cross-validated in {folds} parts of {len(measured)} iterations: {found.mean_error:.2%} in the mean"
    )
    rows = [(name, value, f"{error:.1%}", count) for name, value, error, count in groups]
    print(tabulate(rows, ["of those with", "", "mean error", "iterations"]))
    print("\nworst:")
    worst = sorted(zip(found.errors, bound, strict=True), key=lambda pair: -abs(pair[0]))[:WORST]
    cells = [(*(one.row[name] for name in GROUPED), f"{error:+.1%}") for error, one in worst]
    print(tabulate(cells, [*GROUPED, "predicted against measured"]))


def measurements(recipe: LoadedRecipe, file: str) -> tuple[list[Bound], list[MeasuredIteration]]:
    """The rows of ``file`` that have a plan and a finite time; raises RecipeError where there is no column of times."""
    rows = read_candidates(recipe, file)
    column = next((name for name in SECONDS if name in rows[0]), None)
    if column is None:
        names = " or ".join(SECONDS)
        problem = f"{file} lacks the column {names}; prediction.columns may give one of its own that name"
        raise recipe.error("prediction.columns", problem)
    bound = [one for one in bind(recipe, [row for row in rows if _is_time(row[column])]) if one.plan is not None]
    measured = [
        MeasuredIteration(model=one.model, plan=one.plan, seconds=SECONDS[column] * float(one.row[column]))
        for one in bound
    ]
    return bound, measured


def by_group(bound: Sequence[Bound], found: Calibration) -> list[tuple[str, str, float, int]]:
    """Mean error of the iterations that share a degree or a micro-batch size, and how many they are."""
    groups = []
    for name in GROUPED:
        for value in sorted({one.row[name] for one in bound}, key=int):
            errors = [abs(e) for e, one in zip(found.errors, bound, strict=True) if one.row[name] == value]
            groups.append((name, value, sum(errors) / len(errors), len(errors)))
    return groups


def _is_time(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False
