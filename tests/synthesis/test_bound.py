"""Lower bounds and certificates where the best order is known. Random problems are in tests/synthesis/test_exact.py."""

from dataclasses import replace
from math import inf

import pytest

from auto3d.errors import InputError
from auto3d.schedule import build_schedule
from auto3d.schedule.operation import Schedule
from auto3d.simulate.costs import Costs, uniform
from auto3d.simulate.simulate import simulate
from auto3d.synthesis.bound import jackson, lower_bound
from auto3d.synthesis.certificate import Certificate, certificate, departure
from auto3d.synthesis.exact import optimum
from auto3d.synthesis.problem import Problem, peaks
from tests.schedule.samples import by_hand
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
    made = certificate([problem], by_rule(problem, "1f1b"), 51.0, seconds=10)
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
    best = optimum(problem, seconds=60).schedule
    assert best is not None
    fast = certificate([problem], best, 40.0, seconds=0)
    solved = certificate([problem], best, 40.0, seconds=60)
    assert 0 < fast.gap < 0.2
    assert str(fast).startswith(f"within {fast.gap:.2%} of the best possible: no order takes less than ")
    assert str(solved) == "the best possible: no order takes less than 40 (optimum of an exact solver)"
    with pytest.raises(InputError, match="makespan of 30 is less than"):
        certificate([problem], best, 30.0, seconds=0)


@pytest.mark.parametrize("end", ["import os; os.abort()", "import sys; sys.exit(1)", "import time; time.sleep(60)"])
def test_a_solver_that_ends_or_hangs_leaves_the_fast_bound(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auto3d.synthesis.apart._CODE", end)
    monkeypatch.setattr("auto3d.synthesis.apart.START_S", 0.5)
    problem = random_problem(158)
    best = optimum(problem, seconds=60).schedule
    assert best is not None
    assert certificate([problem], best, 40.0, seconds=0.5) == certificate([problem], best, 40.0, seconds=0)


def test_certificate_of_several_problems_has_the_least_bound() -> None:
    """Problems in which no order fits the memory do not count; if all are such, there is no certificate."""
    roomy, tight, impossible = (straight(4, 8, free=free) for free in (4.0, 2.0, 0.5))
    schedule = by_rule(roomy, "1f1b")
    for problems in ([roomy, tight], [roomy, impossible]):
        assert certificate(problems, schedule, 33.0, seconds=0) == certificate([roomy], schedule, 33.0, seconds=0)
    with pytest.raises(InputError, match="one micro-batch alone exceeds the memory"):
        certificate([impossible], schedule, 33.0, seconds=0)


def test_a_schedule_that_is_no_order_of_the_problem_may_be_shorter_than_its_bound() -> None:
    problem = straight(4, 8, free=inf)
    for name, changed, words in (
        ("zb-h1", problem, "stage 0 splits its backward"),
        ("1f1b", replace(problem, free=(2.0,) * 4), "its activations, at their largest, exceed the memory of device 0"),
    ):
        schedule = by_rule(problem, name)
        made = certificate([changed], schedule, simulate(schedule, problem.costs).makespan, seconds=0)
        assert made.gap < 0
        assert f"shorter than any order of the kind that is sought, because {words}; no order of that" in str(made)


def test_departures() -> None:
    two_way = build_schedule("chimera", devices=4, micro_batches=8, scale="doubling")
    pair = problem_of(4, 4, 8, two_way.device_of, uniform(two_way))
    assert departure(pair, two_way) == "its operations run several micro-batches or parts of one"
    assert departure(pair, build_schedule("chimera", devices=4, micro_batches=8)) == ""
    both = replace(straight(2, 2, free=inf), may_split=frozenset({0, 1}))
    mixed = by_hand("F0@0 F1@0 B0@0 I1@0 W1@0", "F0@1 B0@1 F1@1 B1@1")
    assert departure(both, mixed) == "stage 0 splits only some of its backwards"
    again = build_schedule("1f1b", devices=2, micro_batches=2, recompute="full")
    assert departure(both, again) == "stage 0 recomputes"
    gems = build_schedule("gems", devices=2, micro_batches=3)
    assert departure(problem_of(2, 2, 3, gems.device_of, uniform(gems)), gems) == ""


def test_gap_of_a_bound_of_nothing_is_infinite() -> None:
    assert Certificate(makespan=1.0, lower_bound=0.0, reason="").gap == inf
    assert Certificate(makespan=0.0, lower_bound=0.0, reason="").gap == 0.0


def test_refusals() -> None:
    problem = straight(2, 2, free=0.5)
    with pytest.raises(InputError, match="one micro-batch alone exceeds the memory"):
        lower_bound(problem)
    with pytest.raises(InputError, match="times by operation"):
        lower_bound(replace(problem, costs=replace(problem.costs, by_operation=((1.0, 0.0),))))


def by_rule(problem: Problem, name: str) -> Schedule:
    return build_schedule(name, devices=problem.devices, micro_batches=problem.micro_batches)


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
