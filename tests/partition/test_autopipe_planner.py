"""AutoPipe's planner: its simulation is the simulator's, and its cuts are valid and near the best of all."""

import random
from itertools import accumulate, combinations, pairwise

import pytest

from auto3d.partition.methods.autopipe_planner import FORWARD, AutopipePlanner, fastest_bounds
from auto3d.schedule.shape import shape
from auto3d.simulate.costs import Costs, MessageCost
from auto3d.simulate.simulate import simulate


def seconds(times: list[int]) -> float:
    """The makespan of 1F1B of 2D micro-batches on stages of these times, by this project's simulator."""
    none = (0.0,) * len(times)
    forward = tuple(FORWARD * time for time in times)
    backward = tuple(time - part for time, part in zip(times, forward, strict=True))
    costs = Costs(
        forward=forward,
        backward=backward,
        backward_input=backward,
        backward_weight=none,
        recompute=none,
        sync=none,
        update=none,
        messages=(MessageCost(),) * (len(times) - 1),
        speed=(1.0,) * len(times),
        overlap=True,
    )
    schedule = shape("1f1b", devices=len(times), micro_batches=2 * len(times), options={}).schedule()
    return simulate(schedule, costs).makespan


def test_its_simulation_is_that_of_the_simulator():
    chance = random.Random(1)
    for _ in range(60):
        blocks = [4 * chance.randint(1, 30) for _ in range(chance.randint(2, 9))]
        before = [0, *accumulate(blocks)]
        stages = chance.randint(1, min(5, len(blocks)))
        bounds = (0, *sorted(chance.sample(range(1, len(blocks)), stages - 1)), len(blocks))
        times = [before[last] - before[first] for first, last in pairwise(bounds)]
        assert AutopipePlanner(before).simulated(bounds)[0] == seconds(times)


@pytest.mark.parametrize(
    ("times", "master"),
    [((4, 4, 4), 2), ((8, 4, 4), 0), ((4, 8, 4), 1), ((4, 4, 8), 2), ((8, 8, 4), 1)],
)
def test_the_master_is_the_last_stage_that_never_waits(times, master):
    assert AutopipePlanner([0, *accumulate(times)]).simulated(tuple(range(len(times) + 1)))[1] == master


def test_its_cuts_are_no_slower_than_the_balanced_one_and_near_the_best_of_all():
    chance, gains, losses = random.Random(2), 0, []
    for _ in range(60):
        blocks = [4 * chance.randint(5, 30) for _ in range(chance.randint(6, 10))]
        before, stages = (0.0, *accumulate(map(float, blocks))), chance.randint(2, 4)

        def time(bounds: tuple[int, ...], before: tuple[float, ...] = before) -> float:
            return seconds([int(before[last] - before[first]) for first, last in pairwise(bounds)])

        found = fastest_bounds(before, stages)
        assert (found[0], found[-1], len(found)) == (0, len(blocks), stages + 1)
        assert all(first < last for first, last in pairwise(found))
        balanced = time(AutopipePlanner([int(one) for one in before]).balanced(len(blocks), stages))
        every = (time((0, *inner, len(blocks))) for inner in combinations(range(1, len(blocks)), stages - 1))
        assert time(found) <= balanced * (1 + 1e-9)
        gains += time(found) < balanced * (1 - 1e-9)
        losses.append(time(found) / min(every) - 1)
    assert gains > 10
    assert max(losses) < 0.01
