"""auto3d's own predictions of a set, by each of the cost model's methods."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial

from auto3d.cost.model import CostModel
from auto3d.errors import InputError
from launch.model.costs import planning_subject, subject_of
from launch.model.predictions import PlannedRow, plan_rows
from launch.yardstick.left_out import without
from launch.yardstick.predictors import NOTHING, Predict, Predicted, PredictionRequest

SHOWN_EVERY = 100  # runs


class OurModel:
    """The cost model on the recipe of each set; its methods share the plans of the last set."""

    def __init__(self) -> None:
        self._planned: tuple[PredictionRequest | None, list[PlannedRow]] = (None, [])
        self._peaks: dict[int, tuple[float, ...]] = {}  # number of a run -> its memory, which no method changes

    def by(self, method: str) -> Predict:
        """A predictor that takes the time from ``method``, a key of the cost model's METHODS, and the memory from the
        cost model. A run that is no Plan, or has no time by this method, has no prediction."""
        return self._changed(lambda name: lambda model: model.by(method))

    def left_out(self) -> Predict:
        """The simulator's predictor without the figures that were fitted to times of the set."""
        return self._changed(without)

    def _changed(self, change_for: Callable[[str], Callable[[CostModel], CostModel]]) -> Predict:
        """``change_for`` gives for the name of a set what becomes of its cost models."""

        def predict(asked: PredictionRequest, tell: Callable[[str], None]) -> list[Predicted]:
            changed = cache(change_for(asked.measured.name))
            predictions = []
            for number, planned in enumerate(self._plans(asked, tell)):
                predictions.append(NOTHING)
                if planned.plan is not None:
                    with suppress(InputError):  # for example layers that were not measured at this degree
                        seconds = changed(planned.model).seconds(planned.plan)
                        if number not in self._peaks:
                            self._peaks[number] = tuple(planned.model.memory.of(planned.plan))
                        predictions[-1] = Predicted(seconds, self._peaks[number])
                if len(predictions) % SHOWN_EVERY == 0:
                    tell(f"{len(predictions)} of {len(asked.runs)} runs")
            return predictions

        return predict

    def _plans(self, asked: PredictionRequest, tell: Callable[[str], None]) -> Sequence[PlannedRow]:
        if self._planned[0] is not asked:
            subject = partial(planning_subject, only_predicted=True) if asked.measured.interpolated else subject_of
            plans = []
            for planned in plan_rows(asked.recipe, [run.row for run in asked.runs], subject=subject):
                plans.append(planned)
                if len(plans) % SHOWN_EVERY == 0:
                    tell(f"{len(plans)} of {len(asked.runs)} plans")
            self._planned, self._peaks = (asked, plans), {}
        return self._planned[1]
