"""Tensor parallelism on every model and schedule: `make parity` runs the whole grid, `make soak` a pairwise cover.

The suite runs a sample of that cover.
"""

from collections.abc import Iterator

import pytest

from auto3d.plan import Plan
from auto3d.runtime.settings import OptimizerSettings
from tests.distributed.parity import ITERATIONS, SGD, TWO_ITERATIONS, assert_parity, plain_pytorch, run_rank
from tests.distributed.tensor_grid import SAMPLES, TensorCell, pairwise, plans_of, sample, whole
from tests.processes import ProcessPool


@pytest.fixture(scope="module")
def eight() -> Iterator[ProcessPool]:
    with ProcessPool(8) as pool:
        yield pool


@pytest.fixture
def plan(request: pytest.FixtureRequest, cell: TensorCell) -> Plan:
    """The plan of ``cell``, made together with those of the other cells of its model that this session runs."""
    name = request.node.nodeid.partition("[")[0]
    items = [item for item in request.session.items if item.nodeid.partition("[")[0] == name]
    return plans_of(cell.model, tuple(item.callspec.params["cell"] for item in items))[cell]


def assert_equals_one_process(
    pool: ProcessPool, cell: TensorCell, plan: Plan, optimizer: OptimizerSettings = SGD, iterations: int = ITERATIONS
) -> None:
    assert plan.split, "nothing is split"
    ranks = pool.run(plan.ranks, run_rank, cell.model, plan, optimizer, None, None, iterations)
    settings = {"optimizer": optimizer, "global_batch": plan.global_batch, "iterations": iterations}
    expected = plain_pytorch(cell.model, micro_batch_size=SAMPLES, **settings)
    assert_parity(ranks, expected)


@pytest.mark.parametrize("cell", sample(), ids=str)
def test_sample_of_the_grid(eight, cell, plan):
    assert_equals_one_process(eight, cell, plan, *TWO_ITERATIONS)


@pytest.mark.soak
@pytest.mark.parametrize("cell", pairwise(), ids=str)
def test_pairwise_cover_of_the_grid(eight, cell, plan):
    assert_equals_one_process(eight, cell, plan)


@pytest.mark.parity
@pytest.mark.parametrize("cell", whole(), ids=str)
def test_whole_grid(eight, cell, plan):
    assert_equals_one_process(eight, cell, plan)
