"""Patterns that all micro-batches repeat: their orders can run, fit the memory, and take no longer than the pattern."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from auto3d.schedule import build_schedule
from auto3d.schedule.check import check
from auto3d.simulate.costs import Costs, MessageCost, uniform
from auto3d.simulate.simulate import simulate
from auto3d.synthesis.anneal import seed_random
from auto3d.synthesis.modulo import ModuloPattern, better_pattern, first_pattern, least_period, order_by_pattern
from auto3d.synthesis.problem import Problem, exceeds, peaks
from auto3d.synthesis.tables import BackwardChoices, Tables, bounds_of, schedule_of_order, tables_of
from tests.synthesis.random_problems import random_problem

MICRO_BATCHES = 12


def without_messages_and_updates(costs: Costs) -> Costs:
    nothing = (0,) * len(costs.forward)
    return replace(costs, messages=(MessageCost(),) * (len(costs.forward) - 1), sync=nothing, update=nothing)


def end_of(tables: Tables, pattern: ModuloPattern) -> float:
    """When the last operation ends if all start at the times of ``pattern``."""
    lengths = np.where(tables.exists, tables.duration, 0.0)
    last = (tables.micro_batches.max() - 1) * pattern.period
    return float(np.where(tables.exists, pattern.start + lengths, 0.0).max() + last)


def with_times_of_0(costs: Costs, chance: random.Random) -> Costs:
    """``costs`` with times that are not whole, and without half of R and W: what stages keep takes no time again."""

    def some(times: Sequence[float]) -> tuple[float, ...]:
        return tuple(0.1 * time if chance.random() < 0.5 else 0.0 for time in times)

    forward = tuple(0.37 * time for time in costs.forward)
    recompute, weight = some(costs.recompute), some(costs.backward_weight)
    return replace(costs, forward=forward, recompute=recompute, backward_weight=weight)


@pytest.mark.parametrize("times_of_0", [False, True], ids=["", "times of 0"])
@pytest.mark.parametrize("messages", [False, True], ids=["without messages", "with messages"])
def test_orders_of_random_patterns_run_fit_and_take_no_longer(messages, times_of_0):
    seed_random(0)
    fitting = tight = 0
    for seed in range(150):
        problem = replace(random_problem(seed), micro_batches=MICRO_BATCHES)
        choices = BackwardChoices(split=problem.may_split, recompute=problem.may_recompute)
        if times_of_0:
            problem = replace(problem, costs=with_times_of_0(problem.costs, random.Random(seed)))
        if not messages:
            problem = replace(problem, costs=without_messages_and_updates(problem.costs))
        tables = tables_of(problem, choices)
        fits, pattern = better_pattern(tables, first_pattern(tables), 300)
        if not fits:
            continue
        fitting += 1
        assert pattern.period >= least_period(tables)
        schedule = schedule_of_order(problem, choices, order_by_pattern(tables, pattern), bounds_of(tables))
        check(schedule)
        assert not any(exceeds(problem, schedule)), seed
        if not messages:
            assert simulate(schedule, problem.costs).makespan <= end_of(tables, pattern) * (1 + 1e-6)
        # With a byte less than the order holds, the same pattern does not fit.
        held = [most - 1 for most in peaks(problem, schedule)]
        less = tables_of(replace(problem, free=tuple(held)), choices)
        tight += not better_pattern(less, pattern, 1)[0]
    assert fitting > 60
    assert tight > 0.9 * fitting


@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_equal_stages_find_the_building_blocks_of_the_paper(name):
    """Qi et al. 2024, section 3: with a half or a third of 1F1B's activations, no device waits in the steady state."""
    seed_random(0)
    devices, micro_batches = 4, 32
    schedule = build_schedule(name, devices=devices, micro_batches=micro_batches)
    problem = Problem(
        micro_batches=micro_batches,
        costs=uniform(schedule),
        device_of=schedule.device_of,
        activation=(1.0,) * schedule.stages,
        kept=(0.0,) * schedule.stages,
        deferred=(1.0,) * schedule.stages,
        free=(0.0,) * devices,
        may_split=frozenset(range(schedule.stages)),
    )
    problem = replace(problem, free=tuple(peaks(problem, schedule)))
    choices = BackwardChoices(split=problem.may_split)
    tables = tables_of(problem, choices)
    fits, pattern = better_pattern(tables, first_pattern(tables), 50_000)
    assert fits
    assert pattern.period == pytest.approx(least_period(tables), rel=0.02)
    order = schedule_of_order(problem, choices, order_by_pattern(tables, pattern), bounds_of(tables))
    assert not any(exceeds(problem, order))
