"""The model of a search for several machines: two captures, between which other sizes are interpolated."""

import pytest

from auto3d.capture.interpolate import interpolate
from auto3d.errors import InputError
from auto3d.share import Share
from launch.model.costs import INTERPOLATED, planning_subject
from launch.model.search import search_recipe
from launch.recipe.load import load
from launch.recipe.settings import cluster

REAL_SIZE = ["gpt1.4b", "gpt2.5b", "gpt8.3b", "gpt20b", "gpt175b", "llama3-8b", "llama3-70b", "t5-11b", "vit-22b"]
TWO_NODES = ["cluster.nodes=2", "search.micro_batch_size=[1,2,4,8]"]


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    """A cache of the test's own: another test may have captured the same model, and then nothing starts."""
    monkeypatch.setenv("AUTO3D_CACHE", str(tmp_path / "cache"))


def test_sizes_are_interpolated_between_two_captures(folder):
    subject = planning_subject(load("small.yaml", TWO_NODES))
    graphs = {size: subject.graph(size) for size in (*INTERPOLATED, 8)}
    assert all(graphs[size].fingerprint for size in INTERPOLATED)
    assert graphs[8].micro_batch_size == 8
    assert not graphs[8].fingerprint, "interpolated"


def test_a_size_is_interpolated_once(folder, monkeypatch):
    made: list[int] = []

    def counted(first, second, size):
        made.append(size)
        return interpolate(first, second, size)

    monkeypatch.setattr("launch.model.costs.interpolate", counted)
    subject = planning_subject(load("small.yaml", TWO_NODES))
    for share in (Share(), Share(tp=2), Share(tp=2, sequence_parallel=True)):
        subject.work(8, share)
        subject.split(8, share)
    assert made == [8]


def test_a_model_that_fails_at_a_size_is_captured_at_each(folder):
    """The model fails at 4 samples, so no size is interpolated."""
    (folder / "picky.py").write_text(PICKY)
    subject = planning_subject(load("own.yaml", [*TWO_NODES, "model.factory=picky:model"]))
    assert subject.graph(2).micro_batch_size == 2
    with pytest.raises(InputError, match=r"picky.py, line \d+"):
        subject.graph(4)
    assert subject.graph(8).fingerprint, "captured"


@pytest.mark.soak
@pytest.mark.parametrize("name", REAL_SIZE)
def test_a_recipe_of_real_size_has_a_plan_that_fits_its_devices(name):
    recipe = load(name)
    best = search_recipe(recipe).ranked()[0]
    assert best.plan.ranks == cluster(recipe).devices
    assert best.seconds > 0


PICKY = """
import torch


class Picky(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 3)

    def forward(self, x, y):
        if len(x) == 4:
            raise ValueError("four")
        return torch.nn.functional.cross_entropy(self.linear(x), y)


def model():
    return Picky()
"""
