"""Bytes over time, against the activations and weight versions counted from the order of operations."""

import pytest

from auto3d.partition.recompute import kept_fractions
from auto3d.schedule import build_schedule
from auto3d.schedule.in_flight import in_flight, peak_activations
from auto3d.schedule.weight_versions import weight_copies
from auto3d.simulate.costs import uniform
from auto3d.simulate.simulate import simulate
from tests.each import for_each
from tests.schedule.samples import BY_RULE
from tests.simulate.held_bytes import Sizes, bytes_over_time


def sizes(schedule, *, activations=0.0, kept=0.0, weights=0.0) -> Sizes:
    """Sizes of equal stages, from the bytes of all stages of one device together."""
    fraction = schedule.devices / schedule.stages
    return Sizes(
        activations=(activations * fraction,) * schedule.stages,
        kept=(kept * fraction,) * schedule.stages,
        weights=(weights * fraction,) * schedule.stages,
    )


@pytest.mark.parametrize("name", BY_RULE)
@for_each(("depth", "micro_batches"), [(2, 2), (4, 4), (4, 10), (6, 13)])
def test_peaks_are_the_counts(name, depth, micro_batches):
    schedule = build_schedule(name, devices=depth, micro_batches=micro_batches)
    timeline = simulate(schedule, uniform(schedule))
    by_device = bytes_over_time(timeline, sizes(schedule, activations=1, kept=1))
    assert [device.peak for device in by_device] == pytest.approx(peak_activations(schedule))
    assert all(device.held[-1] == pytest.approx(0) for device in by_device)
    by_device = bytes_over_time(timeline, sizes(schedule, weights=1))
    assert [device.peak for device in by_device] == pytest.approx(weight_copies(schedule))


def test_a_recomputing_stage_keeps_its_inputs_and_one_full_set():
    schedule = build_schedule("1f1b", devices=3, micro_batches=4, recompute="full")
    timeline = simulate(schedule, uniform(schedule))
    by_device = bytes_over_time(timeline, sizes(schedule, activations=100, kept=1))
    assert [device.peak for device in by_device] == [102, 101, 100]
    early = build_schedule("early-recompute", devices=2, micro_batches=1)
    first, _ = bytes_over_time(simulate(early, uniform(early)), sizes(early, activations=100, kept=1, weights=7))
    assert list(zip(first.times, first.held, strict=True)) == [(0, 8), (1, 107), (7, 7)]


def test_a_kept_fraction_costs_memory_and_saves_time():
    """Merak's schedule on four devices with α₁ = 1/4 takes less time and equal bytes on all recomputing devices."""
    schedule = build_schedule("shifted-critical-path", devices=4, micro_batches=8)
    held = in_flight(schedule)
    fractions = kept_fractions(held, 0.25)
    assert held == [4, 3, 3, 1]
    costs = uniform(schedule, kept=fractions)
    assert costs.recompute == pytest.approx([1 - fraction for fraction in fractions])
    timeline, plain = simulate(schedule, costs), simulate(schedule, uniform(schedule))
    assert timeline.makespan < plain.makespan
    kept = Sizes(activations=(100,) * 4, kept=tuple(100 * fraction for fraction in fractions), weights=(0,) * 4)
    peaks = [device.peak for device in bytes_over_time(timeline, kept)]
    assert peaks == pytest.approx([175, 175, 175, 100]), "(n - 1) α + 1 sets of activations, the same on each"
