"""Every cluster and accelerator that is shipped in recipes/ loads, in every precision that it has a peak for."""

from pathlib import Path

import pytest

from launch.recipe.load import RECIPES, load
from launch.recipe.settings import cluster

CLUSTERS = sorted(RECIPES.glob("clusters/*.yaml"))
ACCELERATORS = sorted(RECIPES.glob("accelerators/*.yaml"))


@pytest.mark.parametrize("file", CLUSTERS, ids=lambda file: file.stem)
def test_a_shipped_cluster_loads(file: Path):
    recipe = load("tiny", [f"cluster={file.stem}"])
    kinds = [recipe.values.cluster, *recipe.values.cluster.more]
    machine = cluster(recipe)
    assert machine.devices == sum(kind.nodes * kind.devices_per_node for kind in kinds)
    assert machine.device == "cpu" or machine.memory_bytes, "a GPU's memory is known"


@pytest.mark.parametrize("file", ACCELERATORS, ids=lambda file: file.stem)
def test_a_shipped_accelerator_loads_in_each_of_its_precisions(file: Path):
    _, values = load("tiny").accelerator("cluster.accelerator", file.stem)
    assert values.peak_tflops
    for precision in values.peak_tflops:
        recipe = load("tiny", [f"cluster.accelerator={file.stem}", f"prediction.precision={precision}"])
        kind = cluster(recipe).accelerator(0)
        assert kind.name == file.stem
        assert kind.peak_flops == pytest.approx(values.peak_tflops[precision] * 1e12)
