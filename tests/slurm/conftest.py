"""The SLURM cluster that `make cluster-up` started; without one, its tests are skipped, or fail if one is required."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest

from tests.promises.running import PROGRAMS

REPOSITORY = Path(__file__).parents[2]
AUTO3D = [sys.executable, str(PROGRAMS / "auto3d")]  # forked from the process that has imported torch
PROGRAM = [sys.executable, str(REPOSITORY / "slurm" / "dev-cluster" / "cluster.py")]
ALIAS = Path("/sys/class/net/auto3d/ifalias")  # of the cluster's switch: the folder of the cluster


class SlurmCluster:
    """Runs SLURM's commands from this machine, which is not a node of the cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lines = (folder / "env").read_text().splitlines()
        told = dict(shlex.split(line)[1].split("=", 1) for line in lines)  # export NAME=VALUE
        own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.environment = own | told | {"OMP_NUM_THREADS": "1"}  # a process of the tests computes on one core

    def run(
        self, *command: str, timeout_s: float = 60, code: int | None = 0, cwd: Path = REPOSITORY, **environment: str
    ) -> str:
        """The output of the command. All have a time-out, since srun waits for ever if a node does not answer.

        It has to end with ``code``, or with any.
        """
        done = subprocess.run(
            command,
            cwd=cwd,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert code in (None, done.returncode), f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stderr if code else done.stdout

    def node_states(self) -> dict[str, str]:
        lines = self.run("sinfo", "--Node", "--noheader", "--partition=low", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def all_idle(self) -> bool:
        return set(self.node_states().values()) == {"idle"}

    def start_soon(self, job: str, *changes: str) -> None:
        """A job that SLURM sent back to the queue, and would let wait for two minutes.

        Not at once: on a node where it was killed in the same second, its credential is still revoked, and it is
        killed for good.
        """
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2", *changes)


def wait_for(what: str, true: Callable[[], bool], *, timeout_s: float) -> None:
    deadline = monotonic() + timeout_s
    while not true():
        assert monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        sleep(0.2)


def found_cluster() -> SlurmCluster:
    """The cluster that is up."""
    return SlurmCluster(Path(ALIAS.read_text().strip()))


def why_no_cluster() -> str:
    """Why the tests cannot use a cluster; empty if one is up and all of it runs."""
    status = subprocess.run([*PROGRAM, "status"], capture_output=True, text=True, timeout=120, check=False)
    return f"no SLURM cluster: {(status.stderr or status.stdout).strip()}" if status.returncode else ""


@pytest.fixture(scope="session")
def present_cluster() -> SlurmCluster:
    if reason := why_no_cluster():
        if os.environ.get("AUTO3D_REQUIRE_SLURM"):
            pytest.fail(f"{reason} (AUTO3D_REQUIRE_SLURM is set)")
        pytest.skip(reason)
    return found_cluster()


@pytest.fixture
def cluster(present_cluster):
    """All nodes are idle before a test, and no job remains after it."""
    wait_for("all nodes to be idle", present_cluster.all_idle, timeout_s=60)
    yield present_cluster
    for partition in ("low", "high"):
        present_cluster.run("scancel", f"--partition={partition}")


@pytest.fixture(scope="session")
def one_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sweeps")


@pytest.fixture
def emptied_folder(cluster, one_folder, tmp_path) -> Path:
    """The same empty folder in each test: the cache knows captures of a user's model by the folder, so it has them."""
    for left in one_folder.iterdir():  # by the test before
        left.rename(tmp_path / left.name)
    return one_folder
