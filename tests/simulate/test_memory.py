"""Bytes over time against the counts of activations and weights that follow from the order alone."""

import pytest

from auto3d.errors import InputError
from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.memory import peak_activations, weight_copies
from auto3d.simulate.costs import uniform
from auto3d.simulate.memory import Sizes, bytes_over_time
from auto3d.simulate.simulate import simulate


def sizes(schedule, *, activations=0.0, input=0.0, weights=0.0) -> Sizes:
    """Of one device's whole share of the model."""
    share = schedule.devices / schedule.stages
    return Sizes(
        activations=(activations * share,) * schedule.stages,
        input=(input * share,) * schedule.stages,
        weights=(weights * share,) * schedule.stages,
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("depth", "micro_batches"), [(2, 2), (4, 4), (4, 10), (6, 13)])
def test_peaks_are_the_counts(name, depth, micro_batches):
    schedule = build_schedule(name, devices=depth, micro_batches=micro_batches)
    timeline = simulate(schedule, uniform(schedule))
    by_device = bytes_over_time(timeline, sizes(schedule, activations=1, input=1))
    assert [device.peak for device in by_device] == pytest.approx(peak_activations(schedule))
    assert all(device.held[-1] == pytest.approx(0) for device in by_device)
    by_device = bytes_over_time(timeline, sizes(schedule, weights=1))
    assert [device.peak for device in by_device] == pytest.approx(weight_copies(schedule))


def test_a_recomputing_stage_keeps_its_inputs_and_one_full_set():
    schedule = build_schedule("1f1b", devices=3, micro_batches=4, recompute="full")
    timeline = simulate(schedule, uniform(schedule))
    by_device = bytes_over_time(timeline, sizes(schedule, activations=100, input=1))
    assert [device.peak for device in by_device] == [102, 101, 100]
    early = build_schedule("early-recompute", devices=2, micro_batches=1)
    first, _ = bytes_over_time(simulate(early, uniform(early)), sizes(early, activations=100, input=1, weights=7))
    assert list(zip(first.times, first.held, strict=True)) == [(0, 8), (1, 107), (7, 7)]


def test_sizes_that_do_not_fit():
    schedule = build_schedule("1f1b", devices=3, micro_batches=4)
    with pytest.raises(InputError, match="weights has 1 values; there are 3 stages"):
        bytes_over_time(
            simulate(schedule, uniform(schedule)), Sizes(activations=(1,) * 3, input=(1,) * 3, weights=(1,))
        )
