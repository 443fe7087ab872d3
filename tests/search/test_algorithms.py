"""The table of search algorithms is complete."""

from functools import partial
from pathlib import Path

import pytest

import auto3d.search.algorithms as algorithms
from auto3d.search.algorithms import ALGORITHMS, run_algorithm
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
