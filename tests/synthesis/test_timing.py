"""The compiled time of an order is the simulator's, and its peaks are those of the schedule that it stands for."""

import random

import numpy as np
import pytest

from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.simulate.costs import Costs, MessageCost
from auto3d.simulate.simulate import simulate
from auto3d.synthesis.anneal import anneal, seed_random
from auto3d.synthesis.policy import list_schedule, usual_policies
from auto3d.synthesis.problem import Problem, peaks
from auto3d.synthesis.tables import (
    BackwardChoices,
    bounds_of,
    order_of_schedule,
    orders_of_one_at_a_time,
    schedule_of_order,
    tables_of,
    with_choices,
)
from auto3d.synthesis.timing import make_room, time_and_excess
from auto3d.synthesis.unroll import resized
from tests.synthesis.random_problems import random_problem

CHOICES = [
    BackwardChoices(),
    BackwardChoices(split=frozenset({0, 1})),
    BackwardChoices(recompute=frozenset({1})),
    BackwardChoices(split=frozenset({1}), recompute=frozenset({0})),
]


def random_costs(stages: int, devices: int, *, equal: bool = False) -> Costs:
    chance = random.Random(stages * devices)

    def times(count: int) -> tuple[float, ...]:
        return tuple(1.0 if equal else chance.choice((1.0, 1.5, 2.0, 3.0)) for _ in range(count))

    return Costs(
        forward=times(stages),
        backward=times(stages),
        backward_input=times(stages),
        backward_weight=times(stages),
        recompute=times(stages),
        sync=times(stages),
        update=times(stages),
        messages=tuple(MessageCost(latency=0.1, forward=0.1, backward=0.2) for _ in range(stages - 1)),
        speed=times(devices),
    )


def assert_timed(problem: Problem, choices: BackwardChoices, codes: np.ndarray) -> None:
    """The compiled walk through ``codes`` finds the makespan and the peaks of the schedule that they stand for."""
    tables = tables_of(problem, choices)
    bounds = bounds_of(tables)
    room = make_room(tables, len(codes))
    time, excess = time_and_excess(tables, codes, bounds, room)
    schedule = schedule_of_order(problem, choices, codes, bounds)
    assert time == pytest.approx(simulate(schedule, problem.costs).makespan)
    assert room.most == pytest.approx(peaks(problem, schedule))
    over = [max(0.0, most - free) for most, free in zip(peaks(problem, schedule), problem.free, strict=True)]
    assert excess == pytest.approx(sum(over))


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_random_orders_take_the_time_that_the_simulator_finds(choices):
    """Orders by policies and by annealing, with queues on links, exposed messages, two pipes, sums and updates."""
    seed_random(0)
    for seed in range(40):
        problem = random_problem(seed)
        if problem.stages < 2:
            continue
        tables = tables_of(problem, choices)
        bounds = bounds_of(tables)
        room = make_room(tables, int(bounds[-1]))
        orders = [*orders_of_one_at_a_time(problem, choices)]
        for policy in usual_policies(tables):
            codes = np.zeros(bounds[-1], np.int32)
            if list_schedule(tables, policy, bounds, room, codes):
                orders.append(codes)
        annealed = orders[0].copy()
        anneal(tables, orders[-1].copy(), bounds, room, annealed, 300, 2.0, 1.0, 1.0, 8)
        for codes in [annealed, *orders[:: max(1, len(orders) // 4)]]:
            assert_timed(problem, choices, codes)


def test_schedules_by_rule_are_orders_and_back():
    for name, family in SCHEDULES.items():
        if not family.automatic:
            continue
        for devices, micro_batches in ((2, 5), (4, 8)):
            schedule = build_schedule(name, devices=devices, micro_batches=micro_batches)
            stages = schedule.stages
            problem = Problem(
                micro_batches=micro_batches,
                costs=random_costs(stages, devices),
                device_of=schedule.device_of,
                activation=(2.0,) * stages,
                kept=(1.0,) * stages,
                deferred=(1.0,) * stages,
                free=(100.0,) * devices,
            )
            read = order_of_schedule(problem, schedule)
            if read is None:  # two micro-batches in one operation, or stages that split only some backwards
                assert name in ("chimera", "dualpipe-v", "gems"), name
                continue
            choices, codes = read
            assert_timed(problem, choices, codes)
            again = schedule_of_order(problem, choices, codes, bounds_of(tables_of(problem, choices)))
            assert simulate(again, problem.costs).makespan <= simulate(schedule, problem.costs).makespan * (1 + 1e-9)
            other = BackwardChoices(recompute=frozenset({0}), split=frozenset({stages - 1}))
            assert_timed(problem, other, with_choices(tables_of(problem, choices), codes, other))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v"])
def test_a_longer_order_repeats_the_steady_state(name):
    """Schedules by rule with more micro-batches are among the ways to repeat those with fewer, and back."""
    few, many = (build_schedule(name, devices=4, micro_batches=count) for count in (16, 32))
    for begin, end in ((few, many), (many, few)):
        problems = [
            Problem(
                micro_batches=one.micro_batches,
                costs=random_costs(one.stages, 4, equal=True),
                device_of=one.device_of,
                activation=(1.0,) * one.stages,
                kept=(1.0,) * one.stages,
                deferred=(0.0,) * one.stages,
                free=(1e9,) * 4,
            )
            for one in (begin, end)
        ]
        read = order_of_schedule(problems[0], begin)
        wanted = order_of_schedule(problems[1], end)
        assert read is not None
        assert wanted is not None
        tables = tables_of(problems[0], read[0])
        ways = resized(tables, read[1], bounds_of(tables), end.micro_batches - begin.micro_batches)
        assert any(np.array_equal(way, wanted[1]) for way in ways)
