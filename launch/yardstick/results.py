"""The sets, predicted and scored; and the traces, replayed."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from auto3d.cost.estimate import METHODS
from launch.model.measured_layers import published
from launch.recipe.load import load
from launch.recipe.settings import cluster
from launch.recipe.shipped import RECIPES
from launch.yardstick.left_out import CHANGED, LEFT_OUT
from launch.yardstick.measured import MeasuredSet, PublishedRun
from launch.yardstick.ours import OurModel
from launch.yardstick.predictors import Predicted, PredictionRequest, Predictor
from launch.yardstick.scores import Scores, scores
from launch.yardstick.textbook import amp, chimera, rule_of_thumb, textbook
from launch.yardstick.traces import read_trace, replay

TRACES = ("trace_dp2_pp4", "trace_dp4_pp4_tp4")  # files in recipes/published/data/, without their ending


@dataclass(frozen=True, kw_only=True)
class ScoredPart:
    """The scores of a predictor on a part of a set."""

    part: str
    predictor: Predictor
    scores: Scores
    fitted: bool  # parameters of the predictor were fitted to runs of this part


@dataclass(frozen=True, kw_only=True)
class ScoredSet:
    """A set with what each predictor said, and its scores."""

    measured: MeasuredSet
    runs: tuple[PublishedRun, ...]
    predicted: Mapping[Predictor, Sequence[Predicted]]
    parts: tuple[ScoredPart, ...]


@dataclass(frozen=True)
class ReplayedTrace:
    """A trace and the mean error of its steps: replayed with and without the time that has no record."""

    name: str
    steps: int
    error: float
    recorded_error: float


def predictors() -> dict[str, Predictor]:
    """The predictors that the project has, by name."""
    ours = OurModel()
    known = [
        Predictor(name=f"auto3d-{method}", title=f"our costs, {words}", predict=ours.by(method), ours=True)
        for method, words in zip(METHODS, ("simulated", "AMP's formula", "Chimera's formula"), strict=True)
    ]
    title = "our costs, no figure fitted to times of the set"
    known.append(Predictor(name=LEFT_OUT, title=title, predict=ours.left_out(), ours=True))
    known += [
        Predictor(name="amp", title="AMP's formula on textbook inputs", predict=textbook(amp)),
        Predictor(name="chimera", title="Chimera's formula on textbook inputs", predict=textbook(chimera)),
        Predictor(name="textbook", title="rule of thumb", predict=textbook(rule_of_thumb)),
    ]
    return {predictor.name: predictor for predictor in known}


def score_set(measured: MeasuredSet, chosen: Sequence[Predictor], tell: Callable[[str], None]) -> ScoredSet:
    """Have each of ``chosen`` predict all runs of ``measured``; ``tell`` shows a line of progress.

    Profiles of this machine do not count: the figures are the recipe's.
    """
    recipe = load(str(RECIPES / "published" / f"{measured.name}.yaml"), ["prediction.profile=none"])
    renamed = recipe.values.prediction.columns
    with published(measured.file).open(newline="") as lines:
        rows = [{renamed.get(name, name): value for name, value in row.items()} for row in csv.DictReader(lines)]
    asked = PredictionRequest(measured, recipe, tuple(measured.read(recipe, rows)))
    memory = cluster(recipe).memory_bytes
    predicted: dict[Predictor, Sequence[Predicted]] = {}
    for predictor in chosen:
        tell(f"{measured.name}: {predictor.name}")
        predicted[predictor] = predictor.predict(asked, lambda words: tell(f"{measured.name}: {words}"))
    parts = []
    for part in sorted({part for run in asked.runs for part in run.parts}):
        places = [place for place, run in enumerate(asked.runs) if part in run.parts]
        runs = [asked.runs[place] for place in places]
        for predictor, predictions in predicted.items():
            scored = scores(runs, [predictions[place] for place in places], memory_bytes=memory)
            left_out = predictor.name == LEFT_OUT and measured.name in CHANGED
            fitted = predictor.ours and part in measured.fitted and not left_out
            parts.append(ScoredPart(part=part, predictor=predictor, scores=scored, fitted=fitted))
    return ScoredSet(measured=measured, runs=asked.runs, predicted=predicted, parts=tuple(parts))


def replay_trace(name: str) -> ReplayedTrace:
    """The trace of one of ``TRACES``, replayed."""
    trace = read_trace(published(f"{name}.csv.gz"))
    errors = [
        mean(abs(step.predicted_s / step.measured_s - 1) for step in replay(trace, unrecorded=unrecorded))
        for unrecorded in (True, False)
    ]
    return ReplayedTrace(name, len(trace.steps), *errors)
