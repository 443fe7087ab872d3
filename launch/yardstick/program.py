"""An external program as a predictor: CSV on its standard input, CSV on its standard output (docs/yardstick.md)."""

import csv
import io
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path

from auto3d.errors import InputError
from launch.yardstick.case import case_of
from launch.yardstick.predictors import NOTHING, Predict, Predicted, PredictionRequest, Predictor

COLUMNS = ("id", "seconds", "peak_bytes")  # columns that a program writes
INTERPRETERS = ("python", "sh", "bash", "node", "julia", "Rscript")


def program(command: str, *, limit_s: float) -> Predictor:
    """The predictor that runs ``command`` once for each set, without a shell, for at most ``limit_s`` seconds.

    Raises InputError if the command is no list of words.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"--program: {command!r} cannot be split into words: {error}") from None
    if not words:
        raise InputError("--program: the command is empty; give a program and its arguments")
    name = next((Path(word).name for word in words if not Path(word).name.startswith((*INTERPRETERS, "-"))), words[0])
    return Predictor(name=name, title=f"`{command}`", predict=_predict(words, limit_s))


def _predict(words: Sequence[str], limit_s: float) -> Predict:
    def predict(asked: PredictionRequest, tell: Callable[[str], None]) -> list[Predicted]:
        where = f"--program: {shlex.join(words)} on {asked.measured.name}"
        cases = [case_of(asked.measured, asked.recipe, run) for run in asked.runs]
        text = io.StringIO()
        rows = [case.columns() for case in cases]
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        output = _run(words, text.getvalue(), limit_s, where)
        answers = read_answers(output, where, {case.id: case.pp for case in cases})
        return [answers.get(case.id, NOTHING) for case in cases]

    return predict


def read_answers(text: str, where: str, stages: Mapping[str, int]) -> dict[str, Predicted]:
    """The predictions in a program's CSV, by id; ``stages`` has the number of pipeline devices by id.

    ``peak_bytes`` has one number for all pipeline devices, or a number for each device, separated by spaces.
    An empty field, or a run without a row, is no prediction. Raises InputError, which begins with ``where``, if the
    text has another form.
    """
    reader = csv.DictReader(io.StringIO(text))
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise InputError(f"{where}: its output lacks the column {missing[0]}; it writes {', '.join(COLUMNS)}")
    predictions: dict[str, Predicted] = {}
    for row in reader:
        line = f"{where}: line {reader.line_num} of its output"
        if row["id"] not in stages or row["id"] in predictions:
            problem = "a second time" if row["id"] in predictions else "which is not in its input"
            raise InputError(f"{line} has the id {row['id']!r} {problem}")
        seconds = _numbers(row, "seconds", line)
        if len(seconds) > 1:
            raise InputError(f"{line} has the seconds {row['seconds']!r}; it takes one number, or nothing")
        peaks = _numbers(row, "peak_bytes", line)
        if len(peaks) not in (0, 1, stages[row["id"]]):
            wanted = f"one number, or {stages[row['id']]}, one for each pipeline device"
            raise InputError(f"{line} has {len(peaks)} numbers as peak_bytes; it takes {wanted}")
        predictions[row["id"]] = Predicted(seconds[0] if seconds else None, tuple(peaks))
    return predictions


def _numbers(row: Mapping[str, str | None], name: str, line: str) -> list[float]:
    text = row[name] or ""
    try:
        numbers = [float(word) for word in text.split()]
    except ValueError:
        numbers = [-1.0]
    if not all(isfinite(number) and number > 0 for number in numbers):
        raise InputError(f"{line} has the {name} {text!r}; it takes numbers above 0, or nothing")
    return numbers


def _run(words: Sequence[str], text: str, limit_s: float, where: str) -> str:
    """What the program writes for the input ``text``; it and its children are ended at the time limit."""
    try:
        child = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise InputError(f"{where}: it cannot be started: {error.strerror}") from None
    try:
        output, errors = child.communicate(text, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise InputError(f"{where}: no answer within {limit_s:g} s; --timeout allows more") from None
    except UnicodeDecodeError:
        raise InputError(f"{where}: its output is not UTF-8") from None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if child.returncode:
        last = next((line for line in reversed(errors.splitlines()) if line.strip()), "it wrote no error")
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        raise InputError(f"{where}: it ended with {how}: {last.strip()}")
    return output
