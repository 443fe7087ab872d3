"""Found orders against the best schedules by rule; `python -m tests.benchmarks.synthesis` has more and larger cases."""

from dataclasses import replace

import pytest

from auto3d.schedule import build_schedule
from auto3d.simulate.simulate import simulate
from auto3d.synthesis.bound import lower_bound
from auto3d.synthesis.problem import peaks
from auto3d.synthesis.structures import merged, merged_costs, solve, structures
from tests.synthesis.cases import ONE_COPY, capped, equal

SECONDS = 20.0  # both searches end at their lower bound after 1 s


@pytest.mark.parametrize("micro_batches", [8, 16])
def test_equal_stages_without_cap_are_never_worse(micro_batches: int) -> None:
    possible = structures(replace(equal(4, micro_batches), placements=ONE_COPY))
    solution = solve(possible, seconds=SECONDS)
    least = min(lower_bound(structure.problem).time for structure in possible)
    assert solution.by_rule is not None
    assert solution.synthesis.makespan <= solution.by_rule[0] == pytest.approx(least)


@pytest.mark.soak
def test_a_heavy_last_stage_under_half_the_memory_gains_5_percent() -> None:
    """A last fine stage of twice the time: the order found takes 76, the least possible, and the best by rule 80."""
    bare = replace(equal(4, 8), placements=ONE_COPY)
    heavy = (*bare.forward[:-1], 2 * bare.forward[-1])
    solution = solve(
        structures(capped(replace(bare, forward=heavy, backward_input=heavy, backward_weight=heavy), 0.5)),
        seconds=SECONDS,
    )
    assert solution.by_rule is not None
    assert solution.synthesis.makespan <= 0.95 * solution.by_rule[0] * (1 + 1e-9)
    problem, schedule = solution.structure.problem, solution.synthesis.schedule
    assert solution.synthesis.makespan == pytest.approx(simulate(schedule, problem.costs).makespan)
    assert all(held <= free * (1 + 1e-9) for held, free in zip(peaks(problem, schedule), problem.free, strict=True))


def test_structures_have_all_options_of_schedules_by_rule() -> None:
    """Chimera's doubling and its numbers of pipes, larger groups, and recomputation of as few stages as memory asks."""
    bare = equal(4, 16)
    seeds = [seed for each in structures(bare) for seed in each.seeds]
    doubled = [seed for seed in seeds if any(len(o.micro_batches) > 1 for row in seed.operations for o in row)]
    assert {1 + max(pipe for _, pipe in seed.device_of) for seed in doubled} == {2, 4}
    assert sum(seed.name == "interleaved-1f1b" for seed in seeds) == 3
    half = capped(bare, 0.5, recompute=True)
    like = build_schedule("1f1b", devices=4, micro_batches=16)
    problem = merged(half, like)
    assert problem is not None
    partly = [
        seed
        for each in structures(half)
        for seed in each.seeds
        if seed.name == "1f1b" and 0 < len(seed.recompute) < seed.stages
    ]
    assert partly
    assert all(
        held <= free * (1 + 1e-9)
        for seed in partly
        for held, free in zip(peaks(problem, seed), problem.free, strict=True)
    )


def test_copies_of_a_stage_have_their_own_sync() -> None:
    """A stage of two pipes sums the gradients of its copies; with one copy there is nothing to sum."""
    bare = replace(equal(4, 8), sync_copies=tuple(range(8)))
    two_way = merged_costs(bare, build_schedule("chimera", devices=4, micro_batches=8))
    assert two_way.sync == (0 + 1, 2 + 3, 4 + 5, 6 + 7)
    assert merged_costs(bare, build_schedule("1f1b", devices=4, micro_batches=8)).sync == (0, 0, 0, 0)
