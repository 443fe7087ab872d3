"""The simulation of devices that share processors, against that of independent devices."""

import random
from dataclasses import replace

import pytest

from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.simulate.costs import SharedMachine, uniform
from auto3d.simulate.simulate import simulate
from tests.each import for_each
from tests.schedule.samples import BY_RULE
from tests.simulate.random_schedules import random_costs, random_schedule


def sharing(slowdown, devices):
    return (SharedMachine(slowdown=slowdown, processes=(1,) * devices),)


@for_each("seed", range(100))
def test_without_slowdown_nothing_changes(seed):
    chance = random.Random(seed)
    schedule = random_schedule(chance)
    costs = random_costs(chance, schedule)
    independent = simulate(schedule, costs)
    shared = simulate(schedule, replace(costs, shared_machines=sharing((1.0,) * 4, schedule.devices)))
    assert shared.start == pytest.approx(independent.start)
    assert shared.end == pytest.approx(independent.end)
    assert shared.makespan == pytest.approx(independent.makespan)


@pytest.mark.parametrize("name", [name for name in BY_RULE if not SCHEDULES[name].asynchronous])
def test_two_processors(name):
    """On fewer processors a schedule takes longer, and at least its work divided by the number of processors."""
    schedule = build_schedule(name, devices=4, micro_batches=8)
    costs = uniform(schedule, forward=1.0, update=0.5, p2p=0.1)
    independent = simulate(schedule, costs)
    times = [independent.makespan]
    for processors in (2, 1):
        slowdown = tuple(max(1.0, computing / processors) for computing in range(1, 5))
        times.append(simulate(schedule, replace(costs, shared_machines=sharing(slowdown, 4))).makespan)
    work = sum(end - start for start, end in zip(independent.start, independent.end, strict=True))
    assert times[0] < times[1] < times[2]
    assert times[1] >= work / 2
    assert times[2] == pytest.approx(work, rel=0.1)  # the rest is time in which messages travel and no device computes


def test_replicas_count():
    """Two devices of three processes each, all on one processor."""
    schedule = build_schedule("gpipe", devices=2, micro_batches=1)
    costs = uniform(schedule, forward=1.0)
    shared = (SharedMachine(slowdown=(1.0,), processes=(3, 3)),)
    assert simulate(schedule, replace(costs, shared_machines=shared)).makespan == pytest.approx(
        3 * simulate(schedule, costs).makespan
    )
