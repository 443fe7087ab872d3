"""What follows from a recipe's Graphs, and what of it is kept."""

import os
import signal
import time
from operator import truediv

import pytest

from auto3d.capture import cache
from auto3d.capture.interpolate import interpolate
from auto3d.errors import InputError
from auto3d.plan import PlanError
from auto3d.share import Share
from launch.model.capture_process import CaptureProcess
from launch.model.graphs import PlanningModel
from launch.recipe.load import LoadedRecipe, load
from tests.launch.conftest import MINE

CAUSAL = ["model.config.attn_pdrop=0"]  # no random numbers inside attention, as slices need


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """The folder of a cache of the test's own, which keeps results although the recipe is new."""
    monkeypatch.setenv("AUTO3D_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_STARTED", time.time() + 600)
    return tmp_path / "cache" / "models"


def test_the_sharding_of_an_interpolated_graph_is_not_stored(folder, kept):
    """At 1 sample a model may have other operations than its Graph interpolated from 2 and 4 samples."""
    model = PlanningModel(load("small.yaml", []))
    graph = interpolate(model.graph(2), model.graph(4), 1)
    before = set(kept.iterdir())
    bounds = model.sharding(graph).bounds
    assert set(kept.iterdir()) == before
    assert model.sharding(model.graph(2)).bounds == bounds
    assert len(set(kept.iterdir()) - before) == 1


def test_the_graphs_of_slices_are_kept_and_those_of_another_process_are_the_same(folder, kept):
    model = PlanningModel(load("small.yaml", CAUSAL))
    graphs = model.local_graphs(2, Share(slices=2))
    assert [model.graph_of(2, Share(slices=2, slice_number=number)) for number in range(2)] == list(graphs)
    again = PlanningModel(load("small.yaml", CAUSAL))
    assert again.local_graphs(2, Share(slices=2)) == graphs
    assert not again.captured
    assert again.local_graphs(2, Share(slices=4)) != graphs
    with CaptureProcess() as process:
        assert (
            PlanningModel(load("small.yaml", CAUSAL), fresh=True, process=process).local_graphs(2, Share(slices=2))
            == graphs
        )


def test_a_model_that_cannot_run_in_slices_says_so_in_another_process_too(folder, kept):
    with CaptureProcess() as process:
        for model in (PlanningModel(load("own.yaml", [])), PlanningModel(load("own.yaml", []), process=process)):
            with pytest.raises(InputError, match="schedule: this model cannot run in slices of its sequence"):
                model.local_graphs(4, Share(slices=2))


def _refuse() -> None:
    raise PlanError("it is too large", key="split", kind="memory")


def test_an_error_keeps_its_key_and_kind_in_another_process():
    with CaptureProcess() as process, pytest.raises(InputError, match=r"^split: it is too large$") as refusal:
        process.call(_refuse)
    assert (refusal.value.key, refusal.value.problem, refusal.value.kind) == ("split", "it is too large", "memory")


def _die(_recipe: LoadedRecipe, _size: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_error_of_the_program_in_another_process_is_shown_and_not_taken_for_a_lack_of_memory(folder):
    with CaptureProcess() as process:
        with pytest.raises(RuntimeError, match=r"Traceback[^$]*TypeError: unsupported operand"):
            process.call(truediv, load("small.yaml", CAUSAL), 2)
        with pytest.raises(InputError, match="was killed, as the kernel does when memory runs out"):
            process.call(_die, load("small.yaml", CAUSAL), 2)


def test_a_model_that_changed_is_sharded_again(folder, kept):
    """Another process captures it, so this one never imports the file that changes."""

    def operations_and_last_bound() -> tuple[int, int]:
        with CaptureProcess() as process:
            model = PlanningModel(load("own.yaml", []), process=process)
            graph = model.graph(4)
            return len(graph.nodes), model.sharding(graph).bounds[-1]

    before, bound = operations_and_last_bound()
    assert bound == before
    (folder / "mine.py").write_text(MINE.replace("torch.relu(self.a(x))", "torch.relu(torch.tanh(self.a(x)))"))
    after, bound = operations_and_last_bound()
    assert after == before + 1
    assert bound == after
