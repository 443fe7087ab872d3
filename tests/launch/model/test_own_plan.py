"""A recipe's own plan says how stages are cut, what each keeps, how many replicas they have and where ranks are."""

from dataclasses import replace

import pytest

from auto3d.plan import Plan
from auto3d.search.axes import Candidate
from launch.model.candidates import of_plan, runnable_maker
from launch.model.graphs import PlanningModel
from launch.recipe.load import load

USUAL = Candidate(dp=1, tp=1, pp=2, micro_batch_size=2)


def made(*overrides: str, wanted: Candidate) -> tuple[Plan, Plan]:
    """The plan of small.yaml under ``overrides``, and the plan of the candidate that they describe."""
    recipe = load("small.yaml", overrides)
    graphs = PlanningModel(recipe)
    maker = runnable_maker(graphs)
    return of_plan(graphs, recipe.values.plan), maker.plan(wanted)


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        (["plan.partition=blocks"], {"partition": "blocks"}),
        (["plan.placement=pipelines-first", "plan.dp=2"], {"placement": "pipelines-first", "dp": 2}),
        (["plan.replicas=uneven"], {"replicas": "uneven"}),
        (["plan.cuts=[0,3,7]"], {"cuts": (0, 3, 7)}),
    ],
)
def test_it_is_the_plan_of_the_same_choices(folder, overrides, changes):
    own, wanted = made(*overrides, wanted=replace(USUAL, **changes))
    assert own == wanted
    assert own != made(wanted=USUAL)[0]


def test_each_stage_keeps_the_fraction_that_is_said(folder):
    own, full = made("plan.recompute=full", "plan.kept=[0.5,1]", wanted=replace(USUAL, recompute="full"))
    assert [stage.operations for stage in own.stages] == [stage.operations for stage in full.stages]
    first, last = own.stages
    assert last.kept == last.operations
    assert 0 < count(first.kept) < count(first.operations)


def count(spans: tuple[tuple[int, int], ...]) -> int:
    return sum(end - begin for begin, end in spans)
