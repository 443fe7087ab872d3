"""`auto3d doctor` on a real cluster, healthy and with faults."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.slurm.conftest import AUTO3D, PROGRAM, REPOSITORY, SlurmCluster, wait_for
from tests.slurm.test_dev_cluster import pids
from tests.soak import soak

pytestmark = pytest.mark.timeout(300)


def doctor(devices_per_node: int = 1) -> list[str]:
    return [*AUTO3D, "doctor", "--json", "tiny", f"cluster.devices_per_node={devices_per_node}"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    return tmp_path


def checks(
    cluster: SlurmCluster, folder: Path, *arguments: str, devices_per_node: int = 1, code: int = 0
) -> dict[str, dict]:
    command = [*doctor(devices_per_node), *arguments]
    done = subprocess.run(command, cwd=folder, env=cluster.environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stdout + done.stderr
    assert not cluster.run("squeue", "--noheader", "--partition=low", "--states=PD,R"), "a job is left"
    return {check["what"]: check for check in json.loads(done.stdout)}


def faults(found: dict[str, dict]) -> dict[str, str]:
    return {what: check["verdict"] for what, check in found.items() if check["verdict"] != "ok" and what != "mpi"}


@pytest.mark.parametrize("widths", [[1.0], *soak([0.1, 1.0])], ids=str)
def test_a_healthy_cluster_and_the_width_of_its_links(cluster, folder, widths):
    described = json.loads((cluster.folder / "cluster.json").read_text())["description"]["nodes"]
    by_width: dict[float, list[str]] = {}
    for node in described:
        by_width.setdefault(node["bandwidth_mbit_s"] / 1e3, []).append(node["name"])
    assert sorted(by_width) == [0.1, 1.0]
    reached = {}
    for gbit_per_s in widths:
        nodes = by_width[gbit_per_s]
        found = checks(cluster, folder, f"launch.nodelist={','.join(nodes[:2])}")
        assert faults(found) == {}
        assert {"accounting", "probe job", "shared folder", "versions on nodes", f"clock of {nodes[1]}"} <= found.keys()
        rates = {rate["size_bytes"]: rate for rate in found[f"all-reduce of {' and '.join(nodes[:2])}"]["rates"]}
        reached[gbit_per_s] = rates[2**24]["bus_gbit_per_s"]
        assert reached[gbit_per_s] < 1.1 * gbit_per_s, "a burst passes the shaping"
    assert min(reached.values()) > 0.075
    assert list(reached.values()) == sorted(reached.values())
    assert not list((folder / "runs" / "tiny" / "jobs").iterdir()), "nothing is left to explain"


@pytest.mark.soak
def test_devices_of_two_nodes_exchange_messages_and_train(cluster, folder):
    found = checks(cluster, folder, "--devices", "launch.nodelist=n1,n2", devices_per_node=2)
    assert faults(found) == {}
    rates = {tuple(rate["ranks"]): rate for rate in found["messages of n1 and n2"]["links"]}
    assert [rates[pair]["between_nodes"] for pair in ((0, 1), (1, 2), (2, 3))] == [False, True, False]
    assert "1f1b dp=2 pp=2" in found["exchange of n1 and n2"]["found"]
    assert [one["host"] for one in found["memory of n1 and n2"]["memory"]] == ["n1", "n1", "n2", "n2"]


@pytest.mark.soak
def test_without_accounting_there_is_a_warning(cluster, folder):
    try:
        for pid in pids("control", "slurmdbd"):
            os.kill(pid, signal.SIGKILL)
        found = checks(cluster, folder)
        assert faults(found) == {"accounting": "warning"}
        assert "squeue alone" in found["accounting"]["advice"]
    finally:
        cluster.run(*PROGRAM, "up", timeout_s=120)


@pytest.mark.soak
def test_a_folder_that_the_nodes_do_not_see(cluster, folder):
    """The driver has a file system of its own there, as on a login node's local disk."""
    mount = 'mount -t tmpfs tmpfs "$0" && cd "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, str(folder), *doctor()]
    command[command.index("tiny")] = str(REPOSITORY / "recipes" / "tiny.yaml")
    environment = cluster.environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    found = {check["what"]: check for check in json.loads(done.stdout)}
    assert faults(found) == {"shared folder": "error"}
    assert "a folder that all nodes see" in found["shared folder"]["advice"]


@pytest.mark.soak
def test_nodes_that_cannot_meet(cluster, folder):
    setup = "launch.setup=[export GLOO_SOCKET_IFNAME=nosuch]"
    found = checks(cluster, folder, setup, "launch.nodelist=n1,n2", code=1)
    assert faults(found) == {"rendezvous of n1 and n2": "error"}
    assert "n1 has lo, eth0" in found["rendezvous of n1 and n2"]["advice"]


@pytest.mark.soak
def test_a_queue_that_is_too_long(cluster, folder):
    everything = ["--partition=high", "--exclusive", "--nodes=4", "--output=/dev/null", "--wrap", "sleep 600"]
    cluster.run("sbatch", *everything)
    wait_for("no node to be idle", lambda: "idle" not in cluster.node_states().values(), timeout_s=30)
    found = checks(cluster, folder, "--wait=3", code=1)
    assert faults(found) == {"probe job": "error"}
    assert "waited 3 s for 2 nodes (" in found["probe job"]["found"]


@pytest.mark.soak
def test_a_partition_that_is_not_there_and_what_sbatch_refuses(cluster, folder):
    assert "low (4 nodes)" in checks(cluster, folder, "launch.partition=nosuch", code=1)["partition"]["advice"]
    found = checks(cluster, folder, "launch.additional_parameters.licenses=nosuch", code=1)
    assert "sbatch refused it: " in found["probe job"]["found"]


@pytest.mark.soak
def test_an_interrupt_cancels_the_job(cluster, folder):
    later = "launch.additional_parameters.begin=now+1hour"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = subprocess.Popen([*doctor(), later], cwd=folder, env=cluster.environment, **streams)
    listed = ["squeue", "--noheader", "--partition=low", "--states=PD,R"]
    wait_for("the probe's job", lambda: cluster.run(*listed), timeout_s=60)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert err.splitlines()[-1] == "auto3d: interrupted"
    wait_for("the job to be gone", lambda: not cluster.run(*listed), timeout_s=30)
