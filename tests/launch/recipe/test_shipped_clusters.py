"""Every cluster and accelerator that is shipped in recipes/ loads, in every precision that it has a peak for."""

from pathlib import Path

import pytest

from auto3d.cost.systems import System
from launch.recipe.error import RecipeError
from launch.recipe.load import load
from launch.recipe.settings import cluster, predicted_system
from launch.recipe.shipped import RECIPES
from tests.cuda.page import products, rate

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


def test_the_speeds_of_unaligned_products_are_those_that_an_h100_measured():
    for name in ("H100-80GB", "H100-80GB-nanotron", "GH200-96GB"):
        _, values = load("tiny").accelerator("cluster.accelerator", name)
        for alignment, tflops in ((2, values.tflops_at_2_bytes), (4, values.tflops_at_4_bytes)):
            assert tflops == round(rate(products(alignment)) / 1e12)


@pytest.mark.parametrize(
    ("accelerator", "system", "launch_us", "micro_batch_us"),
    [
        ("GH200-96GB", "deepspeed", 85, 3440),  # the system's figures, from another device
        ("GH200-96GB", "auto3d", 10, 0),  # the file's
        ("GH200-96GB", "megatron", 85, 0),
        ("H100-80GB", "nanotron", 84.7, 0),
        ("V100-16GB", "megatron", 10, 0),  # the file's, which were fitted to this system on this device
        ("A100-80GB", "deepspeed", 85, 3440),
        ("A100-80GB", "nanotron", 84.7, 0),  # those of the file were fitted to another system
    ],
)
def test_a_system_brings_its_host_s_times_to_devices_that_were_not_measured_under_it(
    accelerator, system, launch_us, micro_batch_us
):
    keys = [f"cluster.accelerator={accelerator}", f"prediction.system={system}", "prediction.precision=float16"]
    kind = cluster(load("tiny", keys)).accelerator(0)
    assert (1e6 * kind.launch_s, 1e6 * kind.micro_batch_s) == pytest.approx((launch_us, micro_batch_us))
    files = cluster(load("tiny", [*keys[:1], "prediction.precision=float16"])).accelerator(0)
    assert kind.matrix_efficiency == files.matrix_efficiency, "the device stays as it is"


def test_a_recipe_says_what_a_system_has_a_switch_for():
    def system(*overrides: str, name: str = "nanotron") -> System:
        found = predicted_system(load("tiny", [f"prediction.system={name}", *overrides]).values)
        assert found is not None
        return found

    assert system().keeps_gathered
    assert system().fused_norms
    assert not system("prediction.keeps_gathered=false").keeps_gathered
    assert not system("prediction.norms=eager").fused_norms
    assert system("prediction.keeps_gathered=true", name="megatron").keeps_gathered
    with pytest.raises(RecipeError, match=r"prediction\.keeps_gathered: found 'maybe'"):
        load("tiny", ["prediction.keeps_gathered=maybe"])


@pytest.mark.parametrize(
    ("written", "refused"),
    [
        (
            "matrix_efficiency: {float32: 0.8}",
            "matrix_efficiency: found {'float32': 0.8}; it takes a number of at least",
        ),
        ("matrix_efficiency: {float32: 0.8, float61: 0.4}", "which has float32, float16"),
        (
            "matrix_efficiency: {float32: 0.8, float16: 1.4}",
            "of at least 0.001 and at most 1, or one for each precision",
        ),
        ("matrix_efficiency: 1.4", "matrix_efficiency: found 1.4; it takes a number of at least 0.001"),
        ("matrix_efficiency: fast", "matrix_efficiency: found 'fast'; it takes a number"),
        ("matrix_efficiency:", "matrix_efficiency: found None; it takes a number"),
        (
            "half_gflops: [1, 2]",
            "half_gflops: found [1, 2]; it takes a number of at least 0, or one for each precision",
        ),
        ("half_gflops: {float32: 1, float16: .inf}", "half_gflops: found"),
    ],
)
def test_a_figure_is_one_number_or_one_for_each_precision(written, refused, tmp_path):
    file = tmp_path / "kind.yaml"
    file.write_text("peak_tflops: {float32: 10, float16: 40}\nhalf_gflops: {float32: 1, float16: 4}\n")

    def kind(precision: str):
        return cluster(load("tiny", [f"cluster.accelerator={file}", f"prediction.precision={precision}"])).accelerator(
            0
        )

    assert (kind("float32").half_flops, kind("float16").half_flops) == (1e9, 4e9)
    assert kind("float32").matrix_efficiency == kind("float16").matrix_efficiency == 0.6
    file.write_text(f"peak_tflops: {{float32: 10, float16: 40}}\n{written}\n")
    with pytest.raises(RecipeError) as error:
        kind("float32")
    assert refused in str(error.value)
    assert "\n" not in str(error.value)
