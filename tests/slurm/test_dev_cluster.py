"""`make cluster-up` gives a real cluster: separate hosts and links, queues, accounting, preemption."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.conftest import PROGRAM, wait_for

HERE = Path(__file__).parent


def first_nodes(cluster, count: int) -> str:
    nodes = [node["name"] for node in described(cluster)]
    if len(nodes) < count:
        pytest.fail(f"the cluster has {len(nodes)} nodes; `make cluster-down cluster-up NODES=4`")
    return ",".join(nodes[:count])


def described(cluster) -> list[dict]:
    return json.loads((cluster.folder / "cluster.json").read_text())["description"]["nodes"]


def pids(host: str, program: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", f"auto3d-{host}"], capture_output=True, text=True, check=True)
    found = [int(pid) for pid in listed.stdout.split()]
    return [pid for pid in found if Path(f"/proc/{pid}/comm").read_text().strip() == program]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_node_is_a_host_with_a_network_of_its_own(cluster, count):
    nodes = first_nodes(cluster, count)
    lines = cluster.run("srun", "--nodelist", nodes, "sh", "-c", "echo $(hostname) $(readlink /proc/self/ns/net)")
    hosts, networks = zip(*(line.split() for line in lines.splitlines()), strict=True)
    assert sorted(hosts) == nodes.split(",")
    assert len({*networks, os.readlink("/proc/self/ns/net")}) == count + 1


@pytest.mark.soak  # test_losses_are_those_of_this_machine reduces over ranks of two nodes
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_on_several_nodes_reduce(cluster, count):
    nodes = first_nodes(cluster, count)
    meet = {"MASTER_ADDR": nodes.split(",")[0], "MASTER_PORT": str(29500 + count)}
    out = cluster.run(
        "srun", "--kill-on-bad-exit=1", "--nodelist", nodes, sys.executable, str(HERE / "all_reduce.py"),
        timeout_s=120, **meet,
    )  # fmt: skip
    assert sorted(out.splitlines()) == [f"{node} {count * (count + 1) // 2}" for node in nodes.split(",")]


def test_links_are_as_wide_as_described(cluster):
    """Both directions of the narrowest link, and the widest. Shaping bounds the rate from above, whatever else runs."""
    by_width = sorted(described(cluster), key=lambda node: node["bandwidth_mbit_s"])
    narrow, wide, wider = by_width[0], by_width[-2], by_width[-1]
    for port, (reader, sender) in enumerate([(narrow, wider), (wider, narrow), (wide, wider)], start=29600):
        names = [reader["name"], sender["name"]]
        command = [sys.executable, str(HERE / "stream.py"), names[0], str(port)]
        measured = float(cluster.run("srun", "--nodelist", ",".join(names), *command))
        limit = min(reader["bandwidth_mbit_s"], sender["bandwidth_mbit_s"])
        assert limit / 5 < measured < 1.1 * limit, f"{names[1]} to {names[0]}"


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (3, "FAILED")])
def test_accounting_knows_how_a_job_ended(cluster, code, state):
    name = f"exit-{code}"
    cluster.run("srun", f"--job-name={name}", "sh", "-c", f"exit {code}", code=code)
    sacct = ["sacct", "--noheader", "--allocations", "--parsable2", f"--name={name}", "--format=State"]
    wait_for(f"sacct to show {state}", lambda: state in cluster.run(*sacct).split(), timeout_s=30)


@pytest.mark.soak  # every test of preemption needs it
def test_the_high_partition_sends_a_job_of_the_low_one_back_to_the_queue(cluster, tmp_path):
    nodes = first_nodes(cluster, 2)
    out = tmp_path / "out"
    everything = ["--exclusive", "--nodelist", nodes]
    wrapped = "echo start ${SLURM_RESTART_COUNT:-0}; sleep 600"
    job = cluster.run("sbatch", "--parsable", *everything, "--output", str(out), "--wrap", wrapped).strip()
    wait_for("the low job to start", lambda: out.exists() and out.read_text() == "start 0\n", timeout_s=30)

    cluster.run("srun", "--partition=high", *everything, "true")
    shown = cluster.run("scontrol", "show", "job", job)
    assert "JobState=PENDING" in shown
    assert "Restarts=1" in shown

    cluster.start_soon(job)
    wait_for("the low job to start again", lambda: "start 1\n" in out.read_text(), timeout_s=30)


def test_arrays_are_small(cluster):
    accepted = ["sbatch", "--test-only", "--wrap", "true"]
    cluster.run(*accepted, "--array=0-10")
    assert "Invalid job array specification" in cluster.run(*accepted, "--array=0-11", code=1)


@pytest.mark.soak
def test_cluster_up_mends_a_node_and_leaves_the_rest_alone(cluster):
    nodes = described(cluster)
    broken = nodes[-1]["name"]
    others = [pids("control", "slurmctld"), pids("control", "mariadbd"), pids(nodes[0]["name"], "slurmd")]
    assert all(others)
    for pid in pids(broken, "slurmd"):
        os.kill(pid, signal.SIGKILL)
    wait_for(f"{broken} to be down", lambda: cluster.node_states()[broken].startswith("down"), timeout_s=90)
    cluster.run(*PROGRAM, "up", timeout_s=120)
    assert cluster.all_idle()
    assert others == [pids("control", "slurmctld"), pids("control", "mariadbd"), pids(nodes[0]["name"], "slurmd")]
