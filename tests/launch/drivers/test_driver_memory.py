"""All commands take the memory of a device from one place."""

import json

import pytest

from launch.model.graphs import PlanningModel
from launch.model.stages import costs_on
from launch.recipe.load import load
from launch.recipe.settings import cluster
from tests.soak import soak

SMALL, LARGE = 0.001, 0.1  # GiB; two stages of small.yaml's model need something between


@pytest.fixture
def kinds(folder):
    """Accelerators with too little, with enough and with unknown memory."""
    files = folder / "recipes" / "accelerators"
    files.mkdir(parents=True)
    (files / "small.yaml").write_text(f"peak_tflops: {{float32: 10}}\nmemory_gib: {SMALL}\n")
    (files / "large.yaml").write_text(f"peak_tflops: {{float32: 1}}\nmemory_gib: {LARGE}\n")
    (files / "unknown.yaml").write_text("peak_tflops: {float32: 1}\n")


SEARCH = ["search.dp=[1]", "search.pp=[2]", "search.micro_batch_size=[8]", "search.schedule=[1f1b]"]
SEARCH += ["search.allow_idle_devices=true", "plan.micro_batch_size=8"]


@pytest.mark.parametrize(
    ("overrides", "has"),
    [
        (["cluster.accelerator=small"], SMALL),
        (["cluster.accelerator=large", "cluster.memory_gib=0.001"], SMALL),
        (["cluster.accelerator=small", "cluster.memory_gib=0.1"], None),
        (["cluster.accelerator=unknown"], None),
        *soak((["cluster.memory_gib=0.001"], SMALL), (["cluster.accelerator=large"], None)),
    ],
)
def test_train_sweep_and_plan_take_the_memory_of_the_accelerator(kinds, auto3d, overrides, has):
    if has is None:
        auto3d("train", "small.yaml", *overrides, "--json")
        auto3d("plan", "small.yaml", *overrides, *SEARCH)
        return
    for verb in ("train", "sweep", "plan"):
        message = auto3d(verb, "small.yaml", *overrides, *SEARCH, code=2).err
        assert message.count("\n") == 1
        assert "pipeline device 0 needs " in message
        assert f"{has} GiB" in message, message


def test_on_a_mixed_cluster_each_device_has_its_own(kinds, auto3d):
    """Two nodes with one device each: the plan's second stage does not fit on the small one."""
    mixed = ["cluster.devices_per_node=1", "cluster.accelerator=large"]
    mixed += ["cluster.more=[{devices_per_node: 1, accelerator: small}]", "launch.executor=slurm"]
    message = auto3d("sweep", "small.yaml", *mixed, *SEARCH, "--dry-run", code=2).err
    assert "pipeline device 1 needs " in message
    assert f"a device has {SMALL} GiB" in message


def test_recompute_auto_is_for_accelerators_with_memory(kinds, auto3d):
    large = auto3d("train", "small.yaml", "cluster.accelerator=large", "plan.recompute=auto", "--json").out
    assert json.loads(large)["plan"]["schedule_options"] == {"recompute": "none"} or "kept" in large
    for where in ([], ["cluster.accelerator=unknown"]):
        for verb, key in (("train", "plan.recompute=auto"), ("sweep", "search.recompute=[auto]")):
            message = auto3d(verb, "small.yaml", *where, key, code=2).err
            assert message.count("\n") == 1
            assert "found auto, which needs cluster.memory_gib" in message
            assert "or an accelerator that has memory_gib" in message


def test_a_plan_file_is_held_to_it_too(kinds, auto3d):
    auto3d("partition", "small.yaml", "--stages", "2", "--micro-batch-size", "8", "--plan", "plan.json")
    small = ["cluster.accelerator=small", "--plan", "plan.json"]
    message = auto3d("train", "small.yaml", *small, code=2).err
    assert "plan.json: infeasible: pipeline device 1 needs " in message
    assert "cluster.memory_gib sets the GiB" in message


def test_a_partition_is_for_the_devices_links_and_memory_of_the_cluster(kinds, auto3d):
    def partition(*arguments: str) -> dict:
        return json.loads(auto3d("partition", "small.yaml", "--json", *arguments).out)

    fast, slow = (
        partition("--stages", "2", f"cluster.accelerator={kind}", "cluster.memory_gib=1") for kind in ("small", "large")
    )
    assert (fast["device"], slow["device"], slow["memory_bytes"]) == ("small", "large", 2**30)
    assert sum(s["forward_s"] for s in slow["stages"]) > 2 * sum(s["forward_s"] for s in fast["stages"])
    one = ["--method", "rannc", "model.config.n_layer=4", "training.global_batch=32"]
    assert len(partition(*one, "cluster.accelerator=large")["stages"]) == 1
    assert len(partition(*one, "cluster.accelerator=small")["stages"]) > 1
    assert len(partition(*one, "cluster.accelerator=small", "--memory-gib", "1")["stages"]) == 1
    mixed = ["cluster.accelerator=large", "cluster.more=[{accelerator: small}]"]
    assert partition("--stages", "2", "cluster.memory_gib=1", *mixed)["device"] == "large", "the slower"
    message = auto3d("partition", "small.yaml", "--stages", "1", "cluster.accelerator=small", code=2).err
    assert "do not fit devices of" in message


def test_messages_take_the_slowest_link_between_neighbouring_stages(folder):
    """The link inside a node if all stages have room on one node, otherwise the link between nodes."""
    links = ["cluster.nodes=2", "cluster.devices_per_node=2", "cluster.inside={gbit_per_s: 80, latency_us: 5}"]
    recipe = load("small.yaml", [*links, "cluster.outside={gbit_per_s: 8, latency_us: 50}"])
    graph = PlanningModel(recipe).graph(2)
    for stages, bandwidth, latency in ((2, 10e9, 5e-6), (3, 1e9, 50e-6), (9, 1e9, 50e-6), (None, 10e9, 5e-6)):
        costs = costs_on(cluster(recipe), recipe, stages=stages)(graph)
        assert (costs.bandwidth, costs.latency_s) == pytest.approx((bandwidth, latency))
    assert (costs.state_factor, costs.activation_factor) == (4, 1)
    half = load("small.yaml", ["prediction.precision=float16", "prediction.sync_precision=float16"])
    costs = costs_on(cluster(half), half, stages=2)(graph)
    assert (costs.state_factor, costs.activation_factor) == ((2 + 2 + 4 + 8) / 4, 1 / 2)
