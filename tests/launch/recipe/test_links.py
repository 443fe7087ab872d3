"""Links that a recipe leaves out: whose figures stand in for them, and that shipped clusters keep their own."""

import re

import pytest

from auto3d.cluster import Link
from launch.recipe.error import RecipeError
from launch.recipe.load import load
from launch.recipe.settings import cluster
from launch.recipe.shipped import RECIPES

GPUS = "cluster={nodes: 2, devices_per_node: 4, device: cuda}"
SLOW = Link(latency_s=20e-6, bandwidth=100e9 / 8)  # without an accelerator
NVLINK, NDR = Link(latency_s=10e-6, bandwidth=3000e9 / 8), Link(latency_s=30e-6, bandwidth=400e9 / 8)  # H100
EDR = Link(latency_s=8e-6, bandwidth=100e9 / 8, lanes=1)  # V100, whose devices share it

SHIPPED = {  # cluster -> (Gbit/s, microseconds, lanes) inside and outside of each kind of nodes that uses the link
    "a100-80g": [((1840, 20, None), None)],
    "amp-mixed": [((170, 20, None), (10, 50, 1)), (None, (60, 50, 1))],
    "b200": [((6000, 10, None), None)],
    "h100": [((3000, 10, None), None)],
    "laptop": [((100, 20, None), None)],
    "p3": [((170, 20, None), (10, 50, 1))],
    "p3-mixed": [((170, 20, None), (10, 50, 1)), ((50, 20, None), (50, 50, 1))],
    "piz-daint": [(None, (82, 5, 1))],
    "rannc-v100": [((200, 10, None), (100, 8, 1))],
    "rtx3090-64": [((100, 15, None), (100, 10, 1))],
    "t4-16": [((50, 20, None), (50, 50, 1))],
    "v100-32": [((1200, 10, None), (100, 8, 1))],
}
RECIPES_WITH_LINKS = {
    "gpt175b": [((1840, 20, None), (200, 10, None))],
    "gpt2-64": [(None, (82, 5, 1))],
    "llama3-70b": [((3000, 10, None), (400, 8, None))],
    "llama3-8b": [((3000, 10, None), (400, 8, None))],
    "mixed": [((100, 20, None), (1, 200, 1)), ((100, 20, None), (0.1, 1000, 1))],
    "t5-11b": [((1840, 20, None), (200, 10, None))],
    "vit-22b": [((1840, 20, None), (200, 10, None))],
    "published/gh200-opt350m": [((1200, 10, None), (200, 8, None))],
    "published/h100-llama": [((3000, 10, None), (400, 30, None))],
    "published/megatron-sc21": [((1840, 20, None), (200, 10, None))],
    "published/zero-bubble": [((1840, 20, None), (200, 10, None))],
}


def links(*overrides: str) -> list[tuple[Link, Link | None]]:
    """The links of each node, inside and outside."""
    return [(node.inside, node.outside) for node in cluster(load("tiny", overrides)).nodes]


def used(*names: str) -> list[tuple[tuple | None, tuple | None]]:
    """As SHIPPED, of a recipe."""
    values, found = load(names[0], names[1:]).values.cluster, []
    kinds = [values, *values.more]
    for kind in kinds:
        inside, outside = (
            link and (link.gbit_per_s, link.latency_us, link.lanes) for link in (kind.inside, kind.outside)
        )
        several = sum(one.nodes for one in kinds) > 1
        found.append((inside if kind.devices_per_node > 1 else None, outside if several else None))
    return found


def test_shipped_clusters_keep_their_links():
    assert {file.stem for file in RECIPES.glob("clusters/*.yaml")} == SHIPPED.keys()
    for name, figures in SHIPPED.items():
        assert used("tiny", f"cluster={name}") == figures, name
    for name, figures in RECIPES_WITH_LINKS.items():
        assert used(name) == figures, name


def test_an_accelerator_brings_the_links_that_a_recipe_leaves_out():
    assert links(GPUS) == [(SLOW, SLOW)] * 2
    h100 = "cluster.accelerator=H100-80GB"
    assert links(GPUS, h100) == [(NVLINK, NDR)] * 2
    assert links("cluster.nodes=2", h100) == [(SLOW, SLOW)] * 2, "processes on CPUs have no NVLink"
    assert links("cluster.device=cuda", h100, "cluster.outside=null") == [(NVLINK, None)], "none is an answer"
    assert not load("tiny", ["cluster=h100", "cluster.nodes=2"]).assumed_links


@pytest.mark.parametrize(
    ("given", "found", "left_out"),
    [
        ("{gbit_per_s: 8, latency_us: 4}", Link(latency_s=4e-6, bandwidth=1e9), []),
        ("{gbit_per_s: 8}", Link(latency_s=8e-6, bandwidth=1e9), ["cluster.outside.latency_us"]),
        ("{gbit_per_s: 8, lanes: 2}", Link(latency_s=8e-6, bandwidth=1e9, lanes=2), ["cluster.outside.latency_us"]),
        ("{latency_us: 4}", Link(latency_s=4e-6, bandwidth=100e9 / 8, lanes=1), ["cluster.outside.gbit_per_s"]),
        ("{lanes: 2}", Link(latency_s=8e-6, bandwidth=100e9 / 8, lanes=2), ["cluster.outside"]),
    ],
)
def test_a_link_with_some_keys_gets_the_others(given, found, left_out):
    """Lanes belong to a bandwidth: a link of its own bandwidth does not share it as the usual link does."""
    overrides = [GPUS, "cluster.accelerator=V100-32GB", f"cluster.outside={given}"]
    assert {outside for _, outside in links(*overrides)} == {found}
    assert [link.key for link in load("tiny", overrides).assumed_links] == ["cluster.inside", *left_out]


def test_each_kind_of_nodes_has_the_links_of_its_own_accelerator():
    more = "{nodes: 1, devices_per_node: 8, accelerator: V100-32GB, inside: {latency_us: 1}}"
    overrides = [GPUS, "cluster.accelerator=h100-80gb", f"cluster.more=[{more}, {{nodes: 1}}]"]
    v100 = Link(latency_s=1e-6, bandwidth=1200e9 / 8)
    assert links(*overrides) == [(NVLINK, NDR), (NVLINK, NDR), (v100, EDR), (SLOW, SLOW)]
    assert [(link.key, link.accelerator) for link in load("tiny", overrides).assumed_links] == [
        ("cluster.inside", "H100-80GB"),
        ("cluster.outside", "H100-80GB"),
        ("cluster.more[0].inside.gbit_per_s", "V100-32GB"),
        ("cluster.more[0].outside", "V100-32GB"),
        ("cluster.more[1].inside", ""),
        ("cluster.more[1].outside", ""),
    ]


@pytest.mark.parametrize(
    ("written", "refused"),
    [
        ("inside: {gbit_s: 3}", "inside.gbit_s: unknown; did you mean gbit_per_s?"),
        ("inside: {gbit_per_s: 3}", "inside: lacks gbit_per_s or latency_us"),
        ("outside: {gbit_per_s: 0, latency_us: 3}", "outside.gbit_per_s: found 0"),
        ("outside: 5", "outside: found 5; it takes a group of keys"),
    ],
)
def test_an_accelerator_with_a_wrong_link_is_refused(written, refused, tmp_path):
    file = tmp_path / "kind.yaml"
    file.write_text(f"peak_tflops: {{float32: 10}}\n{written}\n")
    with pytest.raises(RecipeError) as error:
        load("tiny", [GPUS, f"cluster.accelerator={file}"])
    assert f"{file}: {refused}" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_accelerator_of_the_user_without_links_leaves_round_figures(tmp_path):
    file = tmp_path / "kind.yaml"
    file.write_text("peak_tflops: {float32: 10}\ninside: {gbit_per_s: 8, latency_us: 4, lanes: 2}\n")
    overrides = [GPUS, f"cluster.accelerator={file}"]
    assert links(*overrides) == [(Link(latency_s=4e-6, bandwidth=1e9, lanes=2), SLOW)] * 2
    assert [link.accelerator for link in load("tiny", overrides).assumed_links] == [str(file), ""]


def test_names_of_files_are_found_in_any_case(tmp_path, monkeypatch):
    found = load("TINY", ["model=GPT2-XL", "cluster=H100", "cluster.accelerator=a100-80gb"])
    exact = load("tiny", ["model=gpt2-xl", "cluster=h100", "cluster.accelerator=A100-80GB"])
    assert (found.name, found.values, found.cluster_name) == (exact.name, exact.values, exact.cluster_name)
    (tmp_path / "recipes/clusters").mkdir(parents=True)
    for name, count in (("own", 3), ("Own", 5)):
        (tmp_path / f"recipes/clusters/{name}.yaml").write_text(f"devices_per_node: {count}")
    monkeypatch.chdir(tmp_path)
    assert load("tiny", ["cluster=Own"]).values.cluster.devices_per_node == 5
    with pytest.raises(RecipeError, match="there is no 'OWN'"):
        load("tiny", ["cluster=OWN"])


@pytest.mark.parametrize(("name", "meant"), [("A100-80G", "A100-80GB"), ("h100_80gb", "H100-80GB"), ("t4x", "T4")])
def test_a_wrong_name_suggests_the_closest_in_any_case(name, meant):
    with pytest.raises(RecipeError, match=rf"did you mean {meant}\?"):
        load("tiny", [f"cluster.accelerator={name}"])


def test_an_unknown_accelerator_is_refused_with_the_lines_of_a_file_for_it(tmp_path):
    with pytest.raises(RecipeError, match="there is no 'RTX9090'") as refusal:
        load("tiny", ["cluster.accelerator=RTX9090"])
    file = tmp_path / "own.yaml"
    file.write_text("\n".join(re.findall("`(.*?)`", str(refusal.value))))
    kind = cluster(load("tiny", [GPUS, f"cluster.accelerator={file}", "prediction.precision=bfloat16"])).accelerator(0)
    assert (kind.peak_flops, kind.memory_bandwidth, kind.memory_bytes) == (989e12, 3350e9, 76 * 2**30)
