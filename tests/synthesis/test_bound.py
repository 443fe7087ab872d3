"""Lower bounds and certificates where the best order is known. Random problems are in tests/synthesis/test_exact.py."""

from dataclasses import replace
from math import inf

import pytest

from auto3d.errors import InputError
from auto3d.schedule import build_schedule
from auto3d.simulate.costs import Costs, uniform
from auto3d.simulate.simulate import simulate
from auto3d.synthesis.bound import jackson, lower_bound
from auto3d.synthesis.certificate import Certificate, certificate, weakest
from auto3d.synthesis.problem import Problem, peaks
from tests.synthesis.random_problems import random_problem


@pytest.mark.parametrize("devices", [4, 8, 16])
@pytest.mark.parametrize("per_device", [2, 8])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "zb-v", "heavy"])
def test_bound_is_the_makespan_of_schedules_that_are_optimal(name: str, devices: int, per_device: int) -> None:
    """Equal stages, or a last stage of twice the time, at the memory that the schedule needs."""
    schedule = build_schedule(name.replace("heavy", "1f1b"), devices=devices, micro_batches=per_device * devices)
    costs = uniform(schedule)
    if name == "heavy":
        costs = replace(costs, forward=(*costs.forward[:-1], 2.0), backward=(*costs.backward[:-1], 4.0))
    problem = problem_of(schedule.stages, devices, schedule.micro_batches, schedule.device_of, costs)
    if name.startswith("zb"):
        problem = replace(problem, may_split=frozenset(range(schedule.stages)))
    problem = replace(problem, free=tuple(peaks(problem, schedule)))
    assert lower_bound(problem).time == pytest.approx(simulate(schedule, costs).makespan)


def test_bound_at_half_the_memory_is_near_the_optimum_and_says_why() -> None:
    """Two micro-batches in flight at a time on the first of 4 devices, each for a round trip of 12."""
    problem = straight(4, 8, free=2.0)
    bound = lower_bound(problem)
    made = certificate(problem, 51.0, seconds=10)
    assert bound.time == pytest.approx(51.0)
    assert bound.reason == ("memory of device 0: at most 2 micro-batches in flight on stage 0, each for 12 or longer")
    assert str(made) == f"the best possible: no order takes less than 51 ({bound.reason})"
    assert lower_bound(replace(problem, free=(inf,) * 4)).reason == "work of device 0"


def test_bound_takes_the_best_choice_of_recomputation() -> None:
    """Recomputation is worth its time where a cap of two activations binds, and is not counted where none does."""
    capped = straight(4, 8, free=2.0)
    recomputing = replace(capped, may_recompute=frozenset(range(4)))
    assert lower_bound(recomputing).time < lower_bound(capped).time
    roomy = straight(4, 8, free=4.0)
    assert lower_bound(replace(roomy, may_recompute=frozenset(range(4)))).time == pytest.approx(33.0)


def test_jackson_interrupts_for_longer_tails() -> None:
    assert jackson([(0.0, 4.0, 0.0), (1.0, 1.0, 5.0)]) == 7.0
    assert jackson([(2.0, 1.0, 3.0)]) == 6.0


def test_certificate_of_a_small_problem_is_the_optimum() -> None:
    problem = random_problem(158)
    fast = certificate(problem, 40.0, seconds=0)
    solved = certificate(problem, 40.0, seconds=60)
    assert 0 < fast.gap < 0.2
    assert str(fast).startswith(f"within {fast.gap:.2%} of the best possible: no order takes less than ")
    assert str(solved) == "the best possible: no order takes less than 40 (optimum of an exact solver)"
    assert weakest([solved, fast]) is fast
    with pytest.raises(InputError, match="makespan of 30 is less than"):
        certificate(problem, 30.0, seconds=0)


def test_gap_of_a_bound_of_nothing_is_infinite() -> None:
    assert Certificate(makespan=1.0, lower_bound=0.0, reason="").gap == inf
    assert Certificate(makespan=0.0, lower_bound=0.0, reason="").gap == 0.0


def test_refusals() -> None:
    problem = straight(2, 2, free=0.5)
    with pytest.raises(InputError, match="one micro-batch alone exceeds the memory"):
        lower_bound(problem)
    with pytest.raises(InputError, match="times by operation"):
        lower_bound(replace(problem, costs=replace(problem.costs, by_operation=((1.0, 0.0),))))


def straight(devices: int, micro_batches: int, *, free: float) -> Problem:
    schedule = build_schedule("1f1b", devices=devices, micro_batches=micro_batches)
    problem = problem_of(devices, devices, micro_batches, schedule.device_of, uniform(schedule))
    return replace(problem, free=(free,) * devices)


def problem_of(
    stages: int, devices: int, micro_batches: int, device_of: dict[tuple[int, int], int], costs: Costs
) -> Problem:
    """Equal stages: an activation of 1, of which 0.1 is kept and 0.5 deferred; no caps."""
    return Problem(
        micro_batches=micro_batches,
        costs=costs,
        device_of=device_of,
        activation=(1.0,) * stages,
        kept=(0.1,) * stages,
        deferred=(0.5,) * stages,
        free=(inf,) * devices,
    )
