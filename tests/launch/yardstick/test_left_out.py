"""What stands in for the figures that were fitted to a set, against the files that have them."""

import pytest

from auto3d.cluster import Accelerator, Cluster, Node
from auto3d.cost.layers import Layer, work_of_layers
from auto3d.cost.model import CostModel
from auto3d.cost.training_options import TrainingOptions
from launch.recipe.load import load
from launch.yardstick.left_out import ITERATIONS, without


@pytest.mark.parametrize("name", ["A100-80GB", "B200-180GB", "H100-80GB-nanotron", "V100-16GB"])
def test_what_other_devices_reach_is_in_their_files(name: str):
    _, values = load("tiny").accelerator("cluster.accelerator", name)
    matrix, half = (
        value["float16"] if isinstance(value, dict) else value
        for value in (values.matrix_efficiency, values.half_gflops)
    )
    assert values.fitted_to
    found = ITERATIONS[name.split("-")[0]]
    assert found == pytest.approx((matrix, half / values.peak_tflops["float16"] / 1e3))


def test_a_set_is_predicted_without_its_own_device():
    """The geometric means of three: 0.8, 0.528 and 0.58 of the peak, and 42.3, 8.25 and 2 µs of it."""
    kind = Accelerator(name="B200-180GB", peak_flops=2250e12, matrix_efficiency=0.547, half_flops=45e9)
    model = CostModel(
        Cluster(nodes=(Node(devices=1, accelerator=kind),), device="cuda"),
        TrainingOptions(),
        lambda samples, share: work_of_layers([Layer(flops=1.0)], samples, share.tp, precision="float16"),
    )
    found = without("b200-llama70b")(model).cluster.accelerator(0)
    assert found.matrix_efficiency == pytest.approx((0.8 * 0.528 * 0.58) ** (1 / 3))
    assert found.half_flops / 2250e12 == pytest.approx((42.31e-6 * 8.251e-6 * 2e-6) ** (1 / 3), rel=1e-3)
    assert without("t4x16-gpt2")(model) is model
