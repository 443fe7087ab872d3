"""Graphs of a recipe that planning commands keep."""

from auto3d.capture.cache import Cache
from auto3d.capture.interpolate import interpolate
from auto3d.partition.merak import sharding_from_json
from launch.model.graphs import PlanningModel
from launch.recipe.load import load


def test_the_sharding_of_an_interpolated_graph_is_not_stored(folder, monkeypatch, tmp_path):
    """At 1 sample a model may have other operations than its Graph interpolated from 2 and 4 samples."""
    monkeypatch.setenv("AUTO3D_CACHE", str(tmp_path / "cache"))  # another test may have captured the model at 1 sample
    model = PlanningModel(load("small.yaml", []))
    graph = interpolate(model.graph(2), model.graph(4), 1)
    assert model.sharding(graph).bounds == model.sharding(model.graph(2)).bounds
    assert Cache().load(model.identity(sharding_at=1, subgraphs=None), sharding_from_json) is None
    assert Cache().load(model.identity(sharding_at=2, subgraphs=None), sharding_from_json) is not None
