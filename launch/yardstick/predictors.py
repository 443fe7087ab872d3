"""Predictors: functions that predict the runs of a set, by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launch.recipe.load import LoadedRecipe
from launch.yardstick.measured import MeasuredSet, PublishedRun


@dataclass(frozen=True)
class Predicted:
    """What a predictor says about a run."""

    seconds: float | None = None
    peaks: tuple[float, ...] = ()  # bytes on each pipeline device, or one number for all of them; empty: none

    def peak(self, device: int | None) -> float | None:
        """Bytes on pipeline device ``device``, or on the fullest; None if there is no prediction."""
        if not self.peaks:
            return None
        return max(self.peaks) if device is None or len(self.peaks) == 1 else self.peaks[device]


NOTHING = Predicted()


@dataclass(frozen=True)
class PredictionRequest:
    """The question to a predictor: the runs of a set, with the set's recipe."""

    measured: MeasuredSet
    recipe: LoadedRecipe
    runs: tuple[PublishedRun, ...]


Predict = Callable[[PredictionRequest, Callable[[str], None]], Sequence[Predicted]]
"""Arguments: the question; a function that shows a line of progress. Result: a Predicted for each run, in order."""


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A predictor with its name in the table."""

    name: str
    title: str
    predict: Predict
    ours: bool = False  # it uses the recipes, so that what was fitted to a set is marked
