"""The exact optimum: equal to that of all orders tried one by one, and simulated as solved. No bound is above it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, islice, product
from math import inf, prod

import pytest

from auto3d.errors import InputError
from auto3d.schedule.check import ScheduleError
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.sync import place_syncs
from auto3d.simulate.simulate import simulate
from auto3d.synthesis.bound import lower_bound
from auto3d.synthesis.exact import optimum
from auto3d.synthesis.problem import Problem, peaks
from tests.soak import soak
from tests.synthesis.random_problems import random_problem

F, R, B, I, W = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
MOST = 5000  # orders of a problem that are tried one by one


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", [range(24), *soak(range(24, 400))])
def test_optimum_is_that_of_all_orders(seeds: range) -> None:
    compared = 0
    for seed in seeds:
        problem = tiny_problem(seed)
        best = least_of_all(problem)
        if best == inf:
            with pytest.raises(InputError, match="no order fits"):
                optimum(problem, seconds=60)
        elif best is not None:
            compared += 1
            solved = optimum(problem, seconds=60)
            assert (seed, solved.time, solved.proven) == (seed, pytest.approx(best), True)
            assert lower_bound(problem).time <= best
    assert compared >= len(seeds) / 4


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seeds", "stages", "micro_batches"), [(range(10), 3, 4), *soak((range(240), 4, 6))])
def test_optimum_is_simulated_fits_and_is_at_least_the_bound(seeds: range, stages: int, micro_batches: int) -> None:
    gaps = []
    for seed in seeds:
        problem = random_problem(seed, stages=stages, micro_batches=micro_batches)
        solved = optimum(problem, seconds=20)
        bound = lower_bound(problem)
        assert solved.schedule is not None
        assert solved.time == simulate(solved.schedule, problem.costs).makespan
        assert all(held <= free for held, free in zip(peaks(problem, solved.schedule), problem.free, strict=True))
        assert bound.time <= solved.time, (seed, bound)
        assert solved.lower_bound <= solved.time * (1 + 1e-9), seed
        if solved.proven:
            gaps.append(solved.time / bound.time - 1)
    assert len(gaps) >= 0.95 * len(seeds)
    print(f"mean gap of {len(gaps)} bounds: {sum(gaps) / len(gaps):.2%}; none: {sum(gap < 1e-6 for gap in gaps)}")
    assert sum(gaps) / len(gaps) < 0.05


def test_times_without_a_common_unit_leave_a_bound() -> None:
    problem = random_problem(9, stages=3, micro_batches=3)
    third = replace(problem.costs, forward=tuple(time / 3 for time in problem.costs.forward))
    solved = optimum(replace(problem, costs=third), seconds=20)
    assert solved.lower_bound <= solved.time <= solved.lower_bound * (1 + 1e-4)
    tenth = replace(problem.costs, backward=tuple(time / 10 for time in problem.costs.backward))
    assert optimum(replace(problem, costs=tenth), seconds=20).proven


def test_no_order_fits() -> None:
    problem = random_problem(1)
    with pytest.raises(InputError, match="no order fits"):
        optimum(replace(problem, free=(0.5,) * problem.devices), seconds=20)


def tiny_problem(seed: int) -> Problem:
    """At most one stage may split and one recompute, so that all orders can be tried."""
    problem = random_problem(seed, stages=2 + seed % 2, micro_batches=2 + seed // 2 % 2)
    split, recompute = sorted(problem.may_split)[seed % 3 :][:1], sorted(problem.may_recompute)[:1]
    return replace(problem, may_split=frozenset(split), may_recompute=frozenset(recompute))


def least_of_all(problem: Problem) -> float | None:
    """The least makespan of all orders, tried one by one; None if there are more than MOST."""
    least, tried = inf, 0
    for split in subsets(problem.may_split):
        for recompute in subsets(problem.may_recompute):
            orders = [
                list(islice(orders_of(problem, device, split, recompute), MOST + 1))
                for device in range(problem.devices)
            ]
            tried += prod(map(len, orders))
            if tried > MOST:
                return None
            for operations in product(*orders):
                schedule = Schedule(
                    name="tried",
                    stages=problem.stages,
                    micro_batches=problem.micro_batches,
                    device_of=problem.device_of,
                    operations=operations,
                    recompute=frozenset(recompute),
                )
                try:
                    least = min(least, simulate(place_syncs(schedule, "lazy"), problem.costs).makespan)
                except ScheduleError:  # devices wait for each other
                    continue
    return least


def orders_of(
    problem: Problem, device: int, split: frozenset[int], recompute: frozenset[int]
) -> Iterator[tuple[Operation, ...]]:
    """All orders of the operations of ``device`` that fit its memory, in any order of micro-batches."""
    first_of = [sum(problem.per_pipe[:pipe]) for pipe in range(problem.pipes)]
    series = [
        [
            tuple(Operation(kind, stage, (number,), pipe) for kind in kinds)
            for kinds in ([F, I, W] if stage in split else [F, B], [F, R, I, W] if stage in split else [F, R, B])
            if R not in kinds or stage in recompute
        ]
        for (stage, pipe), home in problem.device_of.items()
        if home == device
        for number in range(first_of[pipe], first_of[pipe] + problem.per_pipe[pipe])
    ]
    for chosen in product(*series):
        yield from merged(problem, problem.free[device], recompute, chosen, ())


def merged(
    problem: Problem,
    free: float,
    recompute: frozenset[int],
    remaining: tuple[tuple[Operation, ...], ...],
    done: tuple[Operation, ...],
) -> Iterator[tuple[Operation, ...]]:
    """All ways to merge ``remaining`` series after ``done`` within ``free`` bytes."""
    if not any(remaining):
        yield done
    for index, series in enumerate(remaining):
        if series and held(problem, recompute, done, series[0]) <= free:
            rest = (*remaining[:index], series[1:], *remaining[index + 1 :])
            yield from merged(problem, free, recompute, rest, (*done, series[0]))


def held(problem: Problem, recompute: frozenset[int], done: tuple[Operation, ...], now: Operation) -> float:
    """The bytes while ``now`` runs after ``done``."""
    total = 0.0
    for stage, numbers in {(one.stage, one.micro_batches) for one in (*done, now)}:
        before = {one.kind for one in done if (one.stage, one.micro_batches) == (stage, numbers)}
        running = now.kind if (now.stage, now.micro_batches) == (stage, numbers) else None
        if before & {B, W}:
            continue
        if I in before:
            total += problem.deferred[stage]
        elif stage in recompute and R not in before and running not in (R, B, I):
            total += problem.kept[stage]
        else:
            total += problem.activation[stage]
    return total


def subsets(stages: frozenset[int]) -> list[frozenset[int]]:
    ordered = sorted(stages)
    return [frozenset(some) for some in chain.from_iterable(combinations(ordered, n) for n in range(len(ordered) + 1))]
