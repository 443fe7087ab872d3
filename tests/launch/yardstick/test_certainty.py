"""The errors of a set, as intervals are made of them, and the file that keeps those of all sets."""

import csv
from dataclasses import replace
from math import exp, log, sqrt

import pytest

from launch.model.certainty import FILE, Certainty, Origin, known_errors
from launch.model.measured_layers import published
from launch.yardstick.certainty import coverage, known_errors_of, set_errors, write_errors
from launch.yardstick.left_out import CHANGED
from launch.yardstick.measured import MeasuredSet, PublishedRun
from launch.yardstick.predictors import NOTHING, Predicted, Predictor
from launch.yardstick.results import ScoredSet
from launch.yardstick.sets import SETS
from tests.launch.yardstick.test_scores import SIZES

OURS = Predictor(name="auto3d-simulated", title="", predict=lambda asked, tell: [])


def scored(measured, predicted):
    """A set of ``measured`` groups, {group: times}, and what was predicted for each run."""
    runs = [
        PublishedRun(line=2, row={}, sizes=SIZES, group=(group,), seconds=seconds)
        for group, times in measured.items()
        for seconds in times
    ]
    about = MeasuredSet(
        name="own", title="", file="", source="", licence="", system="", read=lambda *_: [], origin=Origin.FITTED
    )
    return ScoredSet(measured=about, runs=tuple(runs), predicted={OURS: predicted}, parts=())


def test_what_plans_of_a_group_have_in_common_does_not_count_between_them():
    predicted = [Predicted(each) for each in (1.0, 2.0, 1.0, 1.0, 5.0)]
    found = set_errors(scored({"a": [2.0, 4.4], "b": [3.0, 3.0], "c": [5.0]}, predicted), OURS)
    logs = [log(2.0), log(2.2), log(3.0), log(3.0), 0.0]
    assert (found.name, found.origin, found.runs) == ("own", Origin.FITTED, 5)
    assert found.mean_log == pytest.approx(sum(logs) / 5)
    assert found.whole == pytest.approx(sqrt(sum(each**2 for each in logs) / 5))
    half = log(1.1) / 2  # each run of group a, from the middle of both
    assert found.between == pytest.approx(sqrt(2 * half**2 / 2))  # two groups of two leave two degrees of freedom


def test_a_run_without_both_times_does_not_count():
    assert set_errors(scored({"a": [1.0, None]}, [NOTHING, Predicted(1.0)]), OURS) is None


def test_coverage_is_the_share_inside():
    one = scored({"a": [1.0, 1.2, 2.0, 0.4]}, [Predicted(1.0)] * 4)
    certainty = Certainty(origin=Origin.FITTED, sets=("b",), whole=log(1.5) / 1.2816, between=0.1)
    assert coverage(one, OURS, certainty) == 0.5
    assert certainty.interval(1.0)[1] == pytest.approx(1.5)


def test_errors_without_what_was_fitted_to_a_set_count_as_from_a_data_sheet():
    """Of a set with fitted figures both count; of one that has no others, the predictor that plans."""
    left = Predictor(name="auto3d-left-out", title="", predict=lambda asked, tell: [])
    one = scored({"a": [1.0, 2.0]}, [Predicted(1.0)] * 2)
    both = replace(one, predicted={OURS: [Predicted(1.0)] * 2, left: [Predicted(2.0)] * 2})
    (known,) = known_errors_of([both])
    assert (known.errors.name, known.errors.origin, known.predictor) == ("own", Origin.FITTED, OURS)
    fitted = replace(both, measured=replace(both.measured, name="v100-megatron"))
    first, second = known_errors_of([fitted])
    assert (first.errors.name, first.errors.origin) == ("v100-megatron", Origin.FITTED)
    assert (second.errors.name, second.errors.origin) == ("v100-megatron, left out", Origin.DATA_SHEET)
    assert second.errors.mean_log == pytest.approx(first.errors.mean_log - log(2))
    measured = replace(both.measured, name="h100-gpt2", origin=Origin.DATA_SHEET)
    (known,) = known_errors_of([replace(both, measured=measured)])
    assert known.predictor is left, "a figure was fitted to this set"
    assert known_errors_of([one]) == [], "one predictor alone was scored"


def test_the_shipped_file_has_every_set_with_its_origin(tmp_path):
    known = known_errors()
    origins = {name: one.origin for name, one in SETS.items() if name != "h100-gpt2"}
    left_out = {f"{name}, left out": Origin.DATA_SHEET for name in CHANGED}
    assert {one.name: one.origin for one in known} == origins | left_out
    assert all(one.whole >= abs(one.mean_log) > 0 for one in known)
    assert all(exp(one.whole) < 10 for one in known)
    file = tmp_path / "certainty.csv"
    write_errors(known, file)
    with file.open() as again:
        assert len(list(csv.DictReader(again))) == len(known)

    assert file.read_text() == published(FILE).read_text()
