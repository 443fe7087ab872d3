"""The throughput columns of a report, by the code of `auto3d table`: measured where a plan ran, else predicted."""

from auto3d.cost.throughput import Throughput, peak_flops_of, throughput
from auto3d.runtime.measurement import Status
from launch.console.records import measured_precision, rates_of
from launch.recipe.data import tokens_per_sample
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import cluster_of_known_peaks, predicted_precision
from launch.report.source import ReportedPlan


class ThroughputColumns:
    """Gives the throughput of the plans of ``recipe``."""

    def __init__(self, recipe: LoadedRecipe) -> None:
        self._recipe = recipe
        self._cluster = cluster_of_known_peaks(recipe, predicted_precision(recipe.values))
        self._tokens_per_sample = tokens_per_sample(recipe.values)

    def of(self, reported: ReportedPlan, measured_s: float | None, predicted_s: float | None) -> Throughput | None:
        """The throughput at the measured seconds per iteration if there are any, else at the predicted seconds."""
        if measured_s is not None:
            trial = next(trial for trial in reported.measurements if trial.status is Status.OK)
            return rates_of(self._recipe, trial, measured_s)
        if predicted_s is None or reported.model is None:
            return None
        return throughput(
            reported.plan,
            predicted_s,
            flops=reported.model.flops(reported.plan),
            tokens_per_sample=self._tokens_per_sample,
            peak_flops=None if self._cluster is None else peak_flops_of(reported.plan, self._cluster),
        )

    def basis(self, *, measured: bool, predicted: bool) -> str:
        """What the columns hold, as a sentence; ``measured``, ``predicted``: whether there are plans of that kind."""
        precisions = {
            f"{measured_precision(self._recipe)} (measured plans)": measured,
            f"{predicted_precision(self._recipe.values)} (predicted plans)": predicted,
        }
        peaks = " and ".join(name for name, is_there in precisions.items() if is_there)
        return (
            "TFLOP/s are those of one device: of the forward and the backward that the model needs, counted on its "
            f"graph, then with what is recomputed. MFU: the first of them by the peak in {peaks}, where the "
            "recipe names an accelerator that has one; none on emulated devices."
        )
