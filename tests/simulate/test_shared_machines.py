"""Devices that share processors, against the simulator of devices that do not."""

import random
from dataclasses import replace

import pytest

from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.simulate.costs import SharedMachine, uniform
from auto3d.simulate.simulate import simulate
from tests.simulate.random_schedules import random_costs, random_schedule


def sharing(slowdown, devices):
    return (SharedMachine(slowdown=slowdown, processes=(1,) * devices),)


@pytest.mark.parametrize("seed", range(100))
def test_without_slowdown_nothing_changes(seed):
    chance = random.Random(seed)
    schedule = random_schedule(chance)
    costs = random_costs(chance, schedule)
    alone = simulate(schedule, costs)
    beside = simulate(schedule, replace(costs, shared_machines=sharing((1.0,) * 4, schedule.devices)))
    assert beside.start == pytest.approx(alone.start)
    assert beside.end == pytest.approx(alone.end)
    assert beside.makespan == pytest.approx(alone.makespan)


@pytest.mark.parametrize("name", [name for name, family in SCHEDULES.items() if not family.asynchronous])
def test_two_processors(name):
    """No schedule is quicker than its work on as many processors, nor than it would be on a processor each."""
    schedule = build_schedule(name, devices=4, micro_batches=8)
    costs = uniform(schedule, forward=1.0, update=0.5, p2p=0.1)
    alone = simulate(schedule, costs)
    times = [alone.makespan]
    for processors in (2, 1):
        slowdown = tuple(max(1.0, computing / processors) for computing in range(1, 5))
        times.append(simulate(schedule, replace(costs, shared_machines=sharing(slowdown, 4))).makespan)
    work = sum(end - start for start, end in zip(alone.start, alone.end, strict=True))
    assert times[0] < times[1] < times[2]
    assert times[1] >= work / 2
    assert times[2] == pytest.approx(work, rel=0.1)  # but for messages on their way while nobody computes


def test_replicas_count():
    """Three processes of each of two devices on one processor that takes turns."""
    schedule = build_schedule("gpipe", devices=2, micro_batches=1)
    costs = uniform(schedule, forward=1.0)
    shared = (SharedMachine(slowdown=(1.0,), processes=(3, 3)),)
    assert simulate(schedule, replace(costs, shared_machines=shared)).makespan == pytest.approx(
        3 * simulate(schedule, costs).makespan
    )
