"""The table of partition methods: complete, and the only place that knows them by name."""

import ast
from pathlib import Path

import pytest

import auto3d.partition.methods as methods
from auto3d.errors import InputError
from auto3d.partition.cost import analytic
from auto3d.partition.methods import METHODS, STAGE_METHODS, method_named
from auto3d.partition.problem import GraphProblem
from auto3d.partition.stage import cut
from tests.models import captured

FOLDER = Path(methods.__file__).parent


def test_every_file_has_a_line_in_the_table():
    files = {path.stem for path in FOLDER.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert {method.file for method in METHODS.values()} == files - {"__init__"}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_function(name):
    method = METHODS[name]
    assert callable(method.choose_partition if method.chooses_stages else method.choose_stages)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", STAGE_METHODS)
def test_every_method_cuts_a_model_into_stages_that_work(name, stages):
    graph = captured("gpt2", 2).graph
    problem = GraphProblem(graph=graph, costs=analytic(graph), stages=stages, micro_batches=8)
    built = cut(graph, METHODS[name].choose_stages(problem))
    assert len(built) == stages
    assert all(stage.flops for stage in built)


def test_no_name_of_a_method_is_compared_elsewhere():
    """Code that asks for a method's name would have to change for a new method."""
    for path in FOLDER.parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                texts = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                assert texts.isdisjoint(METHODS), f"{path}:{node.lineno}"


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(InputError, match=r"method: 'autopip' is not known; .* did you mean autopipe\?"):
        method_named("autopip")
