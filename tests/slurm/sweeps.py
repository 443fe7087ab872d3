"""Commands on a recipe of one's own on the cluster, and what they leave, for tests that disturb them."""

import json
import subprocess
from contextlib import suppress
from pathlib import Path

from launch.store.manifest import Entry, Manifest, State, histories
from tests.launch.conftest import MINE
from tests.slurm.conftest import AUTO3D, SlurmCluster, wait_for
from tests.slurm.test_dev_cluster import pids

OWN = """
model: {factory: 'mine:make'}
data: {source: synthetic, inputs: {x: {kind: normal, shape: [8]}, y: {kind: integers, high: 3}}}
cluster: {nodes: 4, devices_per_node: 1}
training: {global_batch: 8, timeout_s: 30}
search:
  {dp: [1], tp: [1], pp: [2], placement: [megatron], micro_batch_size: [4], schedule: [1f1b], allow_idle_devices: true}
launch: {executor: slurm, trial_timeout_s: 240}
"""
SAVED_S = 7  # until slurmctld has written down that a job runs; if it dies before, the next job gets its number too
LONG = [  # 6 s of iterations: long enough to be hit while they run, however busy the cores are
    *("training.compute=emulated", "emulation={forward_s: 0.02, backward_s: 0.04}", "measure.iterations=30"),
]


class Sweeps:
    """Commands on own.yaml of a folder that all nodes see."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "own.yaml").write_text(OWN)
        (folder / "mine.py").write_text(MINE)

    def auto3d(self, verb: str, *arguments: str, code: int = 0, recipe: str = "own.yaml") -> str:
        return self.cluster.run(*AUTO3D, verb, recipe, *arguments, timeout_s=500, code=code, cwd=self.folder)

    def start(self, verb: str, *arguments: str) -> subprocess.Popen:
        command = [*AUTO3D, verb, "own.yaml", *arguments]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=self.cluster.environment, **streams)

    def rows(self, recipe: str = "own.yaml") -> list[dict]:
        return json.loads(self.auto3d("table", "--json", recipe=recipe))

    def entries(self) -> list[Entry]:
        return Manifest(self.folder / "runs" / "own" / "manifest.jsonl").entries()

    def starts(self) -> list[int]:
        return [history.starts for history in histories(self.entries()).values()]

    def job(self) -> str:
        """The job of the trial that was submitted last."""
        return self.jobs()[-1] if self.jobs() else ""

    def jobs(self) -> list[str]:
        """The job of each trial that was submitted, in their order."""
        return [entry.job for entry in self.entries() if entry.state is State.SUBMITTED]

    def running_on(self, number: int = -1) -> list[str]:
        """The nodes of the job of this number among those submitted; waits until its ranks iterate."""
        told: list[str] = []

        def iterates() -> bool:
            if not self.jobs():
                return False
            job = self.jobs()[number]
            line = self.cluster.run("squeue", "--noheader", f"--jobs={job}", "--format=%T %N", code=0).split()
            if line[:1] != ["RUNNING"]:
                return False
            told[:] = self.cluster.run("scontrol", "show", "hostnames", line[1]).split()
            return all(ranks_on(node) for node in told)

        wait_for("the ranks of a trial", iterates, timeout_s=200)
        return told


def ranks_on(node: str) -> list[int]:
    """The processes on ``node`` that the process of a trial forked."""
    found = []
    for pid in pids(node, "python"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            lines = [Path(f"/proc/{one}/cmdline").read_bytes() for one in (pid, parent)]
            if all(b"submitit.core._submit" in line for line in lines) and lines[0] == lines[1]:
                found.append(pid)
    return found


def end(process: subprocess.Popen, *, code: int = 0) -> str:
    output, _ = process.communicate(timeout=280)
    assert process.returncode == code, output
    return output


def statuses(sweeps: Sweeps) -> list[str]:
    return [row["status"] for row in sweeps.rows()]
