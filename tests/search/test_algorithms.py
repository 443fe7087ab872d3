"""The table of search algorithms is complete, and annealing cools and accepts as it says."""

from functools import partial
from math import exp, inf
from pathlib import Path
from random import Random

import pytest

import auto3d.search.algorithms as algorithms
import auto3d.search.algorithms.annealing as annealing_module
from auto3d.search.algorithms import ALGORITHMS, run_algorithm
from auto3d.search.algorithms.annealing import accepted_s
from auto3d.search.algorithms.exhaustive import exhaustive
from tests.search.cases import random_case, searched


def test_every_file_has_a_line_in_the_table():
    files = {path.stem for path in Path(algorithms.__file__).parent.glob("*.py")}
    assert set(ALGORITHMS.values()) == files - {"__init__"}


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if "rannc" not in name])  # rannc needs a captured model
def test_every_algorithm_finds_plans_within_its_budget(name):
    search = searched(partial(run_algorithm, name), random_case(3, placement=["megatron"]), candidates=200)
    ranked = search.ranked()
    assert ranked
    assert search.looked_at <= 200
    assert [one.seconds for one in ranked] == sorted(one.seconds for one in ranked)
    for one in ranked:
        search.maker.check(one.plan)


def test_annealing_accepts_a_slower_plan_as_often_as_its_temperature_says():
    search = searched(exhaustive, random_case(3, placement=["megatron"], schedule=["1f1b"]))
    fast, *_, slow = sorted({search.seconds(one): one for one in search.domain if search.bound(one) < inf}.items())
    for temperature in (0.5, 1.0, 3.0):  # times the difference
        random, given = Random(1), {"present_s": fast[0], "temperature_s": temperature * (slow[0] - fast[0])}
        answers = [accepted_s(search, slow[1], random, **given) for _ in range(2000)]
        assert sum(each == slow[0] for each in answers) / 2000 == pytest.approx(exp(-1 / temperature), abs=0.04)
        assert {*answers} <= {slow[0], None}
    assert accepted_s(search, fast[1], Random(1), present_s=slow[0], temperature_s=1e-9) == fast[0]
    assert accepted_s(search, slow[1], Random(1), present_s=inf, temperature_s=inf) == slow[0]


def test_annealing_cools_in_rounds_which_begin_at_the_best_plan_so_far(monkeypatch):
    moves: list[tuple[float, float, float | None]] = []  # present and temperature in seconds; what was accepted

    def noted(*arguments, present_s, temperature_s, **others):
        found = accepted_s(*arguments, present_s=present_s, temperature_s=temperature_s, **others)
        moves.append((present_s, temperature_s / present_s, found))
        return found

    monkeypatch.setattr(annealing_module, "accepted_s", noted)
    searched(annealing_module.annealing, random_case(3, placement=["megatron"]), candidates=80)
    assert len(moves) > 60
    best = moves[0][0]  # the first plan that fits
    for number, (present, temperature, found) in enumerate(moves):
        assert temperature == pytest.approx(0.3 * 0.01 ** (number % 20 / 20))
        if number % 20 == 0:
            assert present == best
        best = min(best, inf if found is None else found)
    assert any(present > moves[number - 1][0] for number, (present, *_) in enumerate(moves[1:], 1)), "it goes uphill"
