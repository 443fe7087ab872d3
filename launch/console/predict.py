"""`auto3d predict`: prints or writes the predictions for the rows of a CSV file."""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from auto3d.cost.memory.device import in_gib
from auto3d.words import counted
from launch.console.output import print_json
from launch.model.predictions import PLAN_COLUMNS, Prediction, predict, read_candidates
from launch.model.profile import basis
from launch.recipe.load import LoadedRecipe

ADDED = ("predicted_s", "predicted_peak_bytes", "problem")  # columns of predictions


def print_predictions(recipe: LoadedRecipe, *, file: str, out_file: str | None, as_json: bool) -> None:
    """Predict every row of ``file``, and print a table or write the rows with the predictions to ``out_file``."""
    rows = read_candidates(recipe, file)
    predictions = list(predict(recipe, rows))
    if out_file:
        _write(out_file, predictions)
    if as_json:
        print_json(
            [
                {
                    **prediction.row,
                    **dict(zip(ADDED, (prediction.seconds, prediction.peak_bytes, prediction.problem), strict=True)),
                }
                for prediction in predictions
            ]
        )
    elif out_file:
        print(f"written: {out_file}, {counted(len(predictions), 'row')}")
    else:
        print(_table(predictions))
    problems = sum(bool(prediction.problem) for prediction in predictions)
    measured_in = next((prediction.measured_in for prediction in predictions if prediction.measured_in), "")
    source = f"times are {recipe.values.prediction.method} on {basis(recipe, measured_in)}, not measured"
    print(f"{counted(len(predictions), 'candidate')}, {problems} with a problem; {source}", file=sys.stderr)


def _table(predictions: Sequence[Prediction]) -> str:
    shown = [name for name in predictions[0].row if name in PLAN_COLUMNS or "." in name]
    cells = [
        (
            *(prediction.row[name] for name in shown),
            "" if prediction.seconds is None else f"{prediction.seconds:.4g}",
            "" if prediction.peak_bytes is None else in_gib(prediction.peak_bytes),
            prediction.problem,
        )
        for prediction in predictions
    ]
    return tabulate(cells, [*shown, "predicted s", "peak GiB", "problem"], disable_numparse=True)


def _write(file: str, predictions: Sequence[Prediction]) -> None:
    """Write the rows unchanged, with the predictions in further columns."""
    with Path(file).open("w", newline="") as lines:
        writer = csv.DictWriter(lines, [*predictions[0].row, *ADDED], extrasaction="ignore")
        writer.writeheader()
        for prediction in predictions:
            seconds = "" if prediction.seconds is None else f"{prediction.seconds:.6g}"
            peak = "" if prediction.peak_bytes is None else f"{prediction.peak_bytes:.0f}"
            writer.writerow({**prediction.row, **dict(zip(ADDED, (seconds, peak, prediction.problem), strict=True))})
