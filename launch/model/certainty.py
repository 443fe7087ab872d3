"""How sure predicted times are: intervals from the errors on published runs whose figures had the same origin."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import exp, sqrt

from launch.model.measured_layers import published
from launch.recipe.cluster_schema import AcceleratorRecipe
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import accelerator_figures

FILE = "certainty.csv"  # `auto3d yardstick --out` writes it to recipes/published/data/
_DEVIATIONS = 1.2816  # four of five values of a normal distribution are within so many standard deviations


class Origin(StrEnum):
    """Where the figures of devices come from that decide predicted times."""

    FITTED = "fitted to the same system on the same device"
    OTHER_SYSTEM = "fitted to another system on the same device"
    DATA_SHEET = "from data sheets and single operations"


@dataclass(frozen=True, kw_only=True)
class SetErrors:
    """How far predicted times are from the measured times of a published set, as logarithms of their ratios."""

    name: str
    origin: Origin
    runs: int
    mean_log: float  # mean of log(measured / predicted)
    whole: float  # root of the mean square of it
    between: float | None
    """The same of what remains after the mean of each group of runs among which a planner chooses; None if there are
    no such groups."""


@dataclass(frozen=True, kw_only=True)
class Certainty:
    """The spread of measured times around predicted times, learned from some sets, all of which count the same."""

    origin: Origin
    sets: tuple[str, ...]
    whole: float  # spread of one time
    between: float  # spread of the plans of one model on one cluster, beside what their errors have in common

    def interval(self, seconds: float) -> tuple[float, float]:
        """The times between which a measurement of a plan, predicted to take ``seconds``, lies in four cases of
        five."""
        factor = exp(_DEVIATIONS * self.whole)
        return seconds / factor, seconds * factor

    def tells_apart(self, seconds: float, others: float) -> bool:
        """Whether a plan is faster than another, predicted to take longer, in nine cases of ten."""
        return others / seconds > 1 + self.least_difference

    def tied(self, seconds: Sequence[float]) -> int:
        """How many plans behind the first may be as fast; ``seconds`` are those predicted, in rising order."""
        return sum(not self.tells_apart(seconds[0], other) for other in seconds[1:])

    @property
    def least_difference(self) -> float:
        """How much longer a plan must be predicted to take than another plan that is surely faster."""
        return exp(_DEVIATIONS * sqrt(2) * self.between) - 1


def certainty_from(errors: Sequence[SetErrors], origin: Origin) -> Certainty | None:
    """What the sets of ``origin`` teach; None if there are none."""
    sets = [known_set for known_set in errors if known_set.origin is origin]
    if not sets:
        return None
    between = [known_set.between for known_set in sets if known_set.between is not None]
    return Certainty(
        origin=origin,
        sets=tuple(known_set.name for known_set in sets),
        whole=root_mean_square([known_set.whole for known_set in sets]),
        between=root_mean_square(between or [known_set.whole for known_set in sets]),
    )


def root_mean_square(values: Sequence[float]) -> float:
    return sqrt(sum(value**2 for value in values) / len(values))


def certainty_of(recipe: LoadedRecipe, measured_in: str) -> Certainty | None:
    """How sure predictions of ``recipe`` are; None where no published set is like it: on CPUs, on round figures, and
    with a profile of the machine itself (``measured_in``)."""
    figures = accelerator_figures(recipe)
    if measured_in or recipe.values.cluster.device == "cpu" or None in figures:
        return None
    origins = {_origin(recipe, figure) for figure in figures if figure is not None}
    return certainty_from(known_errors(), max(origins, key=list(Origin).index))


def _origin(recipe: LoadedRecipe, figures: AcceleratorRecipe) -> Origin:
    if recipe.values.model.layers is not None:
        return Origin.FITTED  # its layers were measured on the device
    if not figures.fitted_to:
        return Origin.DATA_SHEET
    return Origin.FITTED if figures.fitted_to == recipe.values.prediction.system else Origin.OTHER_SYSTEM


def certainty_lines(certainty: Certainty, seconds: Sequence[float]) -> str:
    """What the intervals of plans that are predicted to take ``seconds``, in rising order, rest on; and how many of
    the plans after the first may be as fast."""
    sets = ", ".join(certainty.sets)
    text = f"80 %: between these times four of five measurements lie, by the errors on {sets}, where figures of "
    text += f"devices are, as here, {certainty.origin}"
    if alike := certainty.tied(seconds):
        plans = "plan 2 is" if alike == 1 else f"plans 2 to {alike + 1} are"
        text += f"\n{plans} as fast as plan 1, within what is known (≈): plans of a model differ by up to "
        text += f"{certainty.least_difference:.0%} from what is predicted"
    return text


@cache
def known_errors() -> tuple[SetErrors, ...]:
    """The errors that `auto3d yardstick` found last, in the order of its sets."""
    with published(FILE).open(newline="") as lines:
        return tuple(
            SetErrors(
                name=row["set"],
                origin=Origin[row["origin"]],
                runs=int(row["runs"]),
                mean_log=float(row["mean_log"]),
                whole=float(row["whole"]),
                between=float(row["between"]) if row["between"] else None,
            )
            for row in csv.DictReader(lines)
        )
