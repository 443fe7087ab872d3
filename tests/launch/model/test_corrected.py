"""Predicted times corrected by other plans' trials, against numbers by hand and against many simulated machines."""

from math import exp, log, sqrt
from random import Random
from statistics import stdev

import pytest

from launch.model.corrected import corrected


def test_a_prediction_takes_the_ratios_of_the_other_plans_and_not_its_own():
    """Two others took 6 and 1.5 times as long: 3 times, and Student's quantile of one degree of freedom is 3.078."""
    found = corrected([1.0, 2.0, 4.0, 5.0, None], [100.0, 12.0, 6.0, None, 7.0])
    first = found[0]
    assert (first.seconds, first.trials) == (pytest.approx(3.0), 2)
    factor = exp(3.0777 * stdev([log(6), log(1.5)]) * sqrt(1.5))
    assert first.interval_s == pytest.approx((3 / factor, 3 * factor), rel=1e-3)
    assert found[3].seconds == pytest.approx(5 * (100 * 6 * 1.5) ** (1 / 3)), "a plan without a trial has all ratios"
    assert found[4] is None, "there is nothing to correct"


def test_a_correction_needs_two_other_trials():
    assert corrected([1.0, 2.0], [2.0, 4.0]) == [None, None]
    assert corrected([], []) == []


def test_four_of_five_measurements_lie_in_the_interval():
    """Machines six times slower than predicted whose plans differ by 20 %, with 3 to 8 trials each."""
    random = Random(7)
    inside = count = 0
    for _ in range(1500):
        predicted = [random.uniform(0.1, 1) for _ in range(random.randint(3, 8))]
        measured = [one * exp(random.gauss(log(6), 0.2)) for one in predicted]
        for one, there in zip(corrected(predicted, measured), measured, strict=True):
            low, high = one.interval_s
            inside += low <= there <= high
            count += 1
    assert 0.78 < inside / count < 0.82
