"""Every schedule with all its options on every model: `make parity` runs the whole grid, `make soak` a pairwise cover.

The suite runs fewer cells, in which every model meets every schedule.
"""

from dataclasses import replace

import numpy as np
import pytest

from auto3d.partition.methods.uniform import uniform
from auto3d.partition.stage import cut
from auto3d.runtime.settings import OptimizerSettings
from tests.distributed.grid import RECOMPUTE, SAMPLES, UNEVEN, Cell, pairwise, plan_of, sample, schedule_of, whole
from tests.distributed.parity import (
    ITERATIONS,
    SGD,
    TWO_ITERATIONS,
    assert_buffers,
    assert_parity,
    plain_pytorch,
    run_rank,
)
from tests.models import captured
from tests.soak import soak


@pytest.fixture(autouse=True, scope="module")
def captures(request: pytest.FixtureRequest) -> None:
    """Those of all cells that run: the pool forks its ranks anew once there are more, and these begin cold."""
    here = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    for model in dict.fromkeys(each.params["cell"].model for each in here if each and "cell" in each.params):
        captured(model, SAMPLES)


def reference(
    model: str, global_batch: int, optimizer: OptimizerSettings = SGD, iterations: int = ITERATIONS
) -> list[dict]:
    settings = {"optimizer": optimizer, "global_batch": global_batch, "iterations": iterations}
    return plain_pytorch(model, micro_batch_size=SAMPLES, **settings)


def run(processes, cell: Cell, optimizer: OptimizerSettings = SGD, iterations: int = ITERATIONS) -> list[dict]:
    """Train ``cell`` and compare it with plain PyTorch."""
    plan = plan_of(cell)
    ranks = processes.run(plan.ranks, run_rank, cell.model, plan, optimizer, None, None, iterations)
    expected = reference(cell.model, plan.global_batch, optimizer, iterations)
    assert_parity(ranks, expected)
    pipes = {pipe for _, pipe in schedule_of(cell).device_of}
    if cell.dp == 1 and len(pipes) == 1:  # each copy of a stage has buffers of its own
        assert_buffers(ranks, expected)
    return ranks


@pytest.mark.parametrize("cell", [*sample(), UNEVEN], ids=str)
def test_sample_of_the_grid(processes, cell):
    run(processes, cell, *TWO_ITERATIONS)


@pytest.mark.soak
@pytest.mark.parametrize("cell", pairwise(), ids=str)
def test_pairwise_cover_of_the_grid(processes, cell):
    run(processes, cell)


@pytest.mark.parity
@pytest.mark.parametrize("group", whole(), ids=lambda group: str(group[0]))
def test_whole_grid(processes, group):
    """Recomputation changes no bit of any gradient."""
    assert_equal_bits(processes, group)


@pytest.mark.parametrize("model", ["gpt2-4-heads-dropout", *soak("llama-grouped-query", "two-losses")])
def test_slices_that_run_again(processes, model):
    """A slice that is recomputed joins its keys and values with those that the stage has kept of earlier slices."""
    cell = Cell(
        model=model, schedule="seq1f1b", options=(("slices", 4),), devices=2, dp=1, micro_batches="D", recompute="none",
        sync="eager",
    )  # fmt: skip
    assert_equal_bits(processes, [replace(cell, recompute=each) for each in RECOMPUTE])


def assert_equal_bits(processes, group: list[Cell]) -> None:
    """Train the cells of ``group``, which differ in what they recompute, and compare their gradients."""
    first, *others = [run(processes, cell) for cell in group]
    for ranks in others:
        for kept, again in zip(first, ranks, strict=True):
            for name, gradient in kept["history"][-1]["gradients"].items():
                assert np.array_equal(gradient, again["history"][-1]["gradients"][name]), name


def test_a_stage_of_the_twins_has_no_parameters():
    graph = captured("twins", SAMPLES).graph
    held = [set(stage.state) & set(graph.parameters) for stage in cut(graph, uniform(graph, 4))]
    assert set() in held
    assert [own for own in held if own] == [{"first.weight"}, {"second.weight"}]
