"""A new axis of a plan is a field of Candidate and a field of Plan: everything else finds it there."""

import subprocess
import sys

import pytest

from tests.launch.test_layout import ROOT
from tests.promises.preloaded import SCRIPT

PROGRAM = '''
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

CANDIDATE = """    expert: int = _axis(
        default=1,
        meaning="expert-parallel degree",
        trying="expert-parallel degrees to try",
        tried=(1,),
        every=lambda cluster, batch: [1, 2],
        least=1,
        is_degree=IS_DEGREE,
        heading="experts",
        unusual="expert={}",
    )
    cuts: tuple"""
PLAN = """    expert: int = 1
    schema: int"""


def with_axis(name, old, new):
    """Import the module ``name`` with ``new`` in place of ``old`` in its text."""
    file = Path(*name.split(".")).with_suffix(".py")
    text = file.read_text()
    assert text.count(old) == 1
    spec = spec_from_file_location(name, file)
    module = sys.modules[name] = module_from_spec(spec)
    exec(compile(text.replace(old, new), file, "exec"), vars(module))


with_axis("auto3d.plan", "    schema: int", PLAN)
with_axis("auto3d.search.axes", "    cuts: tuple", CANDIDATE)

from auto3d.plan import Plan
from auto3d.search.axes import plan_name
from auto3d.search.space import Domain
from launch.console import ranking, records
from launch.main import run_command
from launch.model.candidates import candidate_of, of_plan, task
from launch.model.graphs import PlanningModel
from launch.model.predictions import PLAN_COLUMNS, candidate_of_row
from launch.model.search import search_recipe
from launch.recipe.load import load
from launch.recipe.settings import cluster, search_space
from launch.store.trials import training_of

recipe = load("tiny", ["search.expert=[1,2]", "search.schedule=[1f1b]", "plan.expert=2", "plan.pp=2"])
space = Domain(search_space(recipe.values), cluster(recipe), task(recipe))
assert {one.expert for one in space} == {1, 2}
assert str(replace(next(iter(space)), expert=2)).endswith("expert=2")
every = Domain(search_space(recipe.changed(["search.expert=auto"]).values), cluster(recipe), task(recipe))
assert len(every) == len(space)

row = {"micro_batch_size": "2", "tp": "1", "dp": "1", "pp": "2", "expert": "2"}
assert "expert" in PLAN_COLUMNS and candidate_of_row(recipe, row).expert == 2
assert candidate_of(recipe.values.plan).expert == 2

graphs = PlanningModel(recipe)
plan = of_plan(graphs, recipe.values.plan)
assert plan.expert == 2 and Plan.from_json(plan.to_json()) == plan
assert plan_name(plan) == "dp=1 tp=1 pp=2 micro-batch=4 1f1b, expert=2"
assert training_of(recipe, plan).name != training_of(recipe, replace(plan, expert=1)).name

search = search_recipe(recipe)
assert {one.plan.expert for one in search.ranked()} == {1, 2}  # they are not taken for the same plan
assert any("expert=2" in ranking.cells(one)[-1] for one in search.ranked())
assert records.HEADINGS["expert"] == "experts"

sys.argv = ["auto3d", "keys"]
run_command()
'''


@pytest.mark.parametrize("is_degree", [False, True])
def test_a_new_axis_is_found_everywhere_from_two_fields(is_degree, tmp_path):
    (tmp_path / SCRIPT).write_text(PROGRAM.replace("IS_DEGREE", f"{is_degree}"))
    command = [sys.executable, str(tmp_path / SCRIPT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [
        "search.expert",
        "[1]",
        "auto or a list of whole numbers of at least 1",
        "expert-parallel degrees to try",
    ] in lines
    assert ["plan.expert", "1", "a whole number of at least 1", "expert-parallel degree"] in lines
