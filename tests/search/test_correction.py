"""Correcting the cost model by trials."""

import pytest

from auto3d.cost.estimate import Estimate
from auto3d.search.correction import Correction, correct


def estimate(compute: float, message: float) -> Estimate:
    return Estimate(
        seconds=compute + message, compute_s=compute, tensor_s=0.0, message_s=message, sync_s=0.0, update_s=0.0,
        bubble_s=0.0, memory=(),
    )  # fmt: skip


def test_factors_that_explain_the_trials_are_found():
    known = [estimate(4.0, 1.0), estimate(2.0, 3.0), estimate(5.0, 0.1)]
    true = Correction(compute=1.7, communication=0.4)
    found = correct(known, [true.seconds(one) for one in known])
    assert (found.compute, found.communication) == pytest.approx((1.7, 0.4))
    assert correct([], []).seconds(known[0]) == known[0].seconds


def test_trials_that_do_not_tell_communication_apart_give_one_factor():
    alike = [estimate(4.0, 1.0), estimate(8.0, 2.0)]
    found = correct(alike, [10.0, 20.0])
    assert (found.compute, found.communication) == pytest.approx((2.0, 2.0))
    opposed = [estimate(4.0, 1.0), estimate(1.0, 4.0)]
    assert correct(opposed, [20.0, 1.0]).compute > 0, "a factor below 0 would rank plans by nonsense"
