"""Measured iterations of a CSV file, and the error of a calibration to them."""

from collections.abc import Sequence

from auto3d.cost.calibrate import Calibration, MeasuredIteration
from launch.model.predictions import PlannedRow, plan_rows, read_candidates
from launch.recipe.load import LoadedRecipe

SECONDS = {"measured_s": 1.0, "measured_ms": 1e-3}  # column of measurements -> its unit in seconds
GROUPED = ("tp", "pp", "dp", "micro_batch_size")


def measurements(recipe: LoadedRecipe, file: str) -> tuple[list[PlannedRow], list[MeasuredIteration]]:
    """The rows of ``file`` that have a plan and a finite time; raises RecipeError without a column of times."""
    rows = read_candidates(recipe, file)
    column = next((name for name in SECONDS if name in rows[0]), None)
    if column is None:
        names = " or ".join(SECONDS)
        problem = f"{file} lacks the column {names}; prediction.columns may give one of its columns that name"
        raise recipe.error("prediction.columns", problem)
    planned, measured = [], []
    for planned_row in plan_rows(recipe, [row for row in rows if _is_time(row[column])]):
        if planned_row.plan is not None:
            planned.append(planned_row)
            measured.append(
                MeasuredIteration(
                    model=planned_row.model,
                    plan=planned_row.plan,
                    seconds=SECONDS[column] * float(planned_row.row[column]),
                )
            )
    return planned, measured


def by_group(planned: Sequence[PlannedRow], calibration: Calibration) -> list[tuple[str, str, float, int]]:
    """Mean absolute error of the iterations of equal degree or micro-batch size: (column, value, error, count)."""
    groups = []
    for name in GROUPED:
        for value in sorted({planned_row.row[name] for planned_row in planned}, key=int):
            errors = [
                abs(e)
                for e, planned_row in zip(calibration.errors, planned, strict=True)
                if planned_row.row[name] == value
            ]
            groups.append((name, value, sum(errors) / len(errors), len(errors)))
    return groups


def _is_time(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False
