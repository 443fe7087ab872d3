"""An error in a description of the cluster is reported in one line. Needs no cluster."""

import sys
from pathlib import Path

import pytest

DEV_CLUSTER = Path(__file__).parents[2] / "slurm" / "dev-cluster"
GOOD = "cpus_per_node: 4\nnodes:\n  n1: {bandwidth_mbit_s: 100, latency_ms: 0.5}\n"


@pytest.fixture
def description(monkeypatch):
    """The module of the program, whose folder is not a package."""
    monkeypatch.syspath_prepend(str(DEV_CLUSTER))
    import description

    yield description
    for name in ("description", "errors"):
        del sys.modules[name]


@pytest.mark.parametrize("name", ["mixed", "uniform"])
def test_those_of_the_repository(description, name):
    read = description.read_description(name, folder=DEV_CLUSTER, num_nodes=4)
    assert [node.name for node in read.nodes] == ["n1", "n2", "n3", "n4"]
    assert description.Description.from_dict(read.to_dict()) == read


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("cpus_per_node: 4", "cpus: 4", "give exactly cpus_per_node, nodes"),
        ("cpus_per_node: 4", "cpus_per_node: many", "cpus_per_node: found 'many'; give a whole number"),
        ("n1:", "n1;reboot:", "found the name 'n1;reboot'; give 1 to 8 small letters and digits"),
        ("n1:", "control:", "not 'control'"),
        ("latency_ms", "delay_ms", "nodes.n1: found bandwidth_mbit_s, delay_ms; give exactly"),
        ("100", "-1", "nodes.n1.bandwidth_mbit_s: found -1; give a number from 1 to 100000"),
        ("0.5", ".nan", "nodes.n1.latency_ms: found nan; give a number from 0 to 1000"),
        ("0.5}", "0.5", "while parsing a flow mapping"),
    ],
)
def test_mistakes(description, tmp_path, old, new, words):
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD.replace(old, new))
    with pytest.raises(description.DescriptionError, match=r"mine\.yaml") as caught:
        description.read_description(str(file), folder=DEV_CLUSTER, num_nodes=None)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_nodes_than_described(description):
    with pytest.raises(description.DescriptionError, match=r"NODES=9: .*mixed\.yaml describes 4 nodes; give 1 to 4"):
        description.read_description("mixed", folder=DEV_CLUSTER, num_nodes=9)
