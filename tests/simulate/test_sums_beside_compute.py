"""What an all-reduce costs the compute beside it: its start, and a slowdown of its devices while it is under way."""

import random
import re
from dataclasses import replace
from itertools import product

import pytest

from auto3d.errors import InputError
from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.operation import Schedule
from auto3d.simulate.costs import Costs, SharedMachine, uniform
from auto3d.simulate.draw_svg import draw_svg
from auto3d.simulate.draw_terminal import draw_terminal
from auto3d.simulate.idle import busy
from auto3d.simulate.simulate import simulate
from auto3d.simulate.work import lay_out
from tests.each import for_each
from tests.simulate.random_schedules import random_costs, random_schedule
from tests.simulate.reference import reference_times
from tests.simulate.test_simulate import by_hand, by_place


def random_case(name: str, sync: str, seed: int) -> tuple[Schedule, Costs]:
    chance = random.Random(f"{name} {sync} {seed}")
    options = {} if SCHEDULES[name].asynchronous else {"sync": sync}
    schedule = build_schedule(name, devices=4, micro_batches=4, **options)
    return schedule, random_costs(chance, schedule, sums_cost=True)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "chimera", "pipedream"])
@for_each(("sync", "seed"), [*product(("lazy", "eager", "eager-opt"), range(8))])
def test_schedules_are_equal_to_the_reference(name, sync, seed):
    schedule, costs = random_case(name, sync, seed)
    found, wanted = by_place(simulate(schedule, costs)), reference_times(schedule, costs)
    for place, times in wanted.items():
        assert found[place] == pytest.approx(times, abs=1e-9), schedule.operations[place[0]][place[1]]


def test_an_all_reduce_by_hand():
    """One device: F0@0 0-1, F0@1 1-2, B0@1 2-4, S@1 4-4.5, its sum 4.5-7.5. B0@0 has done 2 of 4 when that ends."""
    schedule = by_hand("F0@0 F0@1 B0@1 S@1 B0@0 S@0 U@0 U@1", micro_batches=1)
    schedule = replace(schedule, device_of={(0, 0): 0, (1, 0): 0})
    costs = replace(
        uniform(schedule), forward=(1, 1), backward=(4, 2), sync=(1, 3), sync_start=(0.5,), sync_slowdown=(0.5,)
    )
    timeline = simulate(schedule, costs)
    second, first = timeline.syncs
    assert (first.started, first.begin, first.end) == ({0: 4.5}, 4.5, 7.5)
    assert timeline.end[4] == 7.5 + 2
    assert (second.started, second.begin, second.end) == ({0: 10}, 10, 11)
    assert timeline.makespan == 11
    assert busy(timeline) == [10]


def test_starts_are_not_slowed():
    """F0@0 0-1, B0@0 1-2, S@0 2-3, its sum 3-6; S@1 3-4, and its sum waits for the first."""
    schedule = by_hand("F0@0 F0@1 B0@1 B0@0 S@0 S@1", micro_batches=1)
    schedule = replace(schedule, device_of={(0, 0): 0, (1, 0): 0})
    costs = replace(
        uniform(schedule), forward=(1, 0), backward=(1, 0), sync=(3, 1), sync_start=(1.0,), sync_slowdown=(1.0,)
    )
    timeline = simulate(schedule, costs)
    assert timeline.end == [1, 1, 1, 2, 3, 4]
    assert [(sync.begin, sync.end) for sync in timeline.syncs] == [(3, 6), (6, 7)]


def test_two_all_reduces_at_once_slow_as_much_as_one():
    """Device 0 starts its sums at 10 and the others join at 16: both run 16-21. F1@0 has done 6 of 10 by 16, and 2.5
    beside the sums."""
    schedule = by_hand(
        "F0@0 F0@1 B0@1 B0@0 S@0 S@1 F1@0", "F2@0:1 B2@0:1 S@0:1", "F2@1:1 B2@1:1 S@1:1", micro_batches=3, pipes=2
    )
    schedule = replace(schedule, device_of={(0, 0): 0, (1, 0): 0, (0, 1): 1, (1, 1): 2})
    costs = replace(
        uniform(schedule),
        forward=(10.0, 0.0),
        backward=(0.0, 0.0),
        sync=(5.0, 5.0),
        speed=(1.0, 10 / 16, 1.0),
        sync_slowdown=(1.0, 0.0, 0.0),
    )
    timeline = simulate(schedule, costs)
    assert [(sync.begin, sync.end) for sync in timeline.syncs] == [(16, 21), (16, 21)]
    assert timeline.end[6] == 22.5


def test_a_sum_without_time_has_no_start_and_that_of_several_pipes_has_one():
    for sync, starts in ((0.0, 0), (1.0, 2)):
        schedule = build_schedule("chimera", devices=2, micro_batches=2, sync="eager")
        costs = replace(uniform(schedule, sync=sync), sync_start=(0.25, 0.25))
        plain, timeline = (simulate(schedule, each) for each in (replace(costs, sync_start=()), costs))
        assert sum(busy(timeline)) - sum(busy(plain)) == pytest.approx(0.25 * 2 * starts)


@for_each("seed", range(150))
def test_times_only_grow(seed):
    """So what is a lower bound without these costs is one with them."""
    chance = random.Random(seed)
    schedule = random_schedule(chance)
    costs = random_costs(chance, schedule, sums_cost=True)
    plain = simulate(schedule, replace(costs, sync_start=(), sync_slowdown=()))
    timeline = simulate(schedule, costs)
    assert all(a >= b - 1e-9 for a, b in zip(timeline.end, plain.end, strict=True))
    assert timeline.makespan >= plain.makespan - 1e-9
    if any(costs.sync_start) and any(costs.sync):
        assert sum(busy(timeline)) >= sum(busy(plain))


@for_each("seed", range(100))
def test_a_machine_that_slows_nobody_changes_nothing(seed):
    chance = random.Random(seed)
    schedule = random_schedule(chance)
    costs = random_costs(chance, schedule, sums_cost=True)
    machines = (SharedMachine(slowdown=(1.0,) * 4, processes=(1,) * schedule.devices),)
    shared, timeline = simulate(schedule, replace(costs, shared_machines=machines)), simulate(schedule, costs)
    assert (shared.start, shared.end, shared.arrival) == (timeline.start, timeline.end, timeline.arrival)


def test_the_slowdowns_of_a_machine_and_of_a_sum_are_multiplied():
    """Two devices compute 4 beside each other (slowdown 2), and then beside a sum (1.5), too: 3 times 4."""
    schedule = by_hand("F0@0 B0@0 S@0 F2@0", "F1@0:1 B1@0:1 S@0:1 F3@0:1", stages=1, pipes=2, micro_batches=4)
    schedule = replace(schedule, device_of={(0, 0): 0, (0, 1): 1})
    costs = replace(
        uniform(schedule),
        forward=(4.0,),
        backward=(0.0,),
        sync=(1000.0,),
        sync_slowdown=(0.5, 0.5),
        shared_machines=(SharedMachine(slowdown=(1.0, 2.0), processes=(1, 1)),),
    )
    timeline = simulate(schedule, costs)
    assert [timeline.end[number] - timeline.start[number] for number in (0, 3)] == [8.0, 12.0]


def test_figures_of_0_take_the_fast_way():
    schedule = build_schedule("1f1b", devices=4, micro_batches=8, sync="eager")
    costs = uniform(schedule, sync=1.0)
    nothing = replace(costs, sync_start=(0.0,) * 4, sync_slowdown=(0.0,) * 4)
    one, other = simulate(schedule, costs), simulate(schedule, nothing)
    assert (one.start, one.end, one.arrival, one.spans) == (other.start, other.end, other.arrival, other.spans)


def test_wrong_costs_are_refused():
    schedule = build_schedule("1f1b", devices=2, micro_batches=2)
    costs = uniform(schedule, sync=1.0)
    with pytest.raises(InputError, match="sync_slowdown of device 1 is -1; it must be 0 or more"):
        replace(costs, sync_slowdown=(0.0, -1.0))
    with pytest.raises(InputError, match="sync_start has 1 value; schedule 1f1b needs 2"):
        simulate(schedule, replace(costs, sync_start=(1.0,)))
    times = tuple((seconds, after) for seconds, after, *_ in lay_out(schedule, costs).steps)
    with pytest.raises(InputError, match="by_operation has measured times, which have sync_start in them"):
        replace(costs, by_operation=times, sync_start=(1.0, 1.0))


def test_drawings_show_starts_that_take_time():
    schedule = build_schedule("1f1b", devices=2, micro_batches=2, sync="eager")
    plain = uniform(schedule, sync=1.0)
    for costs, count in ((plain, 0), (replace(plain, sync_start=(1.0, 1.0), sync_slowdown=(1.0, 1.0)), 2)):
        timeline = simulate(schedule, costs)
        picture = draw_svg(timeline)
        assert len(re.findall(r"<title>S@\d ", picture)) == count
        assert ("start of a gradient sync" in picture) == bool(count)
        text = draw_terminal(timeline, width=100, colour=False).plain
        assert text.count("S") == 2 * count + bool(count), "each cell's label and kind, and the legend"
