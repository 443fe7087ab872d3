"""Chimera's planner against every plan that it may choose."""

from functools import partial

import pytest

from auto3d.errors import InputError
from auto3d.search.algorithms import run_algorithm
from auto3d.search.axes import Candidate
from tests.search.cases import random_case, searched


@pytest.mark.parametrize("seed", range(12))
def test_it_takes_the_largest_micro_batch_and_the_fastest_degrees_by_equation_1(seed: int):
    case = domain, maker = random_case(seed, tp=[1], placement=["megatron"], partition=["blocks"])
    search = searched(partial(run_algorithm, "chimera"), case)
    equation = maker.model.by("chimera")
    best: dict[tuple[int, int], float] = {}
    for dp, pp in {(one.dp, one.pp) for one in domain.degrees if one.pp % 2 == 0}:
        samples = domain.workload.global_batch // dp  # each pipeline has so many
        for recompute in ("none", "full"):
            fitting: dict[int, float] = {}
            for size in (2**power for power in range(6)):
                wanted = Candidate(
                    dp=dp, tp=1, pp=pp, micro_batch_size=size, schedule="chimera", recompute=recompute,
                    partition="blocks", sync="eager-opt",
                )  # fmt: skip
                try:
                    plan = maker.plan(wanted)
                except InputError:
                    continue
                if samples // size >= min(pp, samples):
                    fitting[size] = equation.seconds(plan)
            if fitting:
                best[dp, pp] = fitting[max(fitting)]
                break
    if not best:
        assert not search.ranked()
        return
    (chosen,) = search.ranked()
    assert (chosen.plan.dp, chosen.plan.pp) == min(best, key=best.__getitem__)
    assert equation.seconds(chosen.plan) == min(best.values())
    assert chosen.seconds == maker.model.seconds(chosen.plan)  # shown by the recipe's own method


def test_it_may_choose_among_the_variants_that_the_axis_names():
    case = random_case(3, tp=[1], placement=["megatron"], schedule=["1f1b", "chimera:scale=halving"])
    (chosen,) = searched(partial(run_algorithm, "chimera"), case).ranked()
    assert chosen.plan.schedule_options["scale"] == "halving"
