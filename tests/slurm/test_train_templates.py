"""slurm/train*.sbatch as a user submits them: by srun, torchrun and mpirun the same training as on this machine."""

import json
import os
import re
import signal
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.slurm.conftest import AUTO3D, REPOSITORY, SlurmCluster, wait_for
from tests.slurm.test_dev_cluster import pids

TEMPLATES = ["train", "train-torchrun", "train-mpirun"]
PLAN = ["tiny", "plan.dp=2", "plan.pp=2", "--json"]
ONE = ["plan.dp=1", "plan.pp=1"]
SMALL = "model.config.n_layer=2"  # each rank captures the model
THREE = ["training.iterations=3", SMALL]
HERE = "launch.executor=local"

OTHERS = [pytest.param(template, marks=pytest.mark.soak) for template in TEMPLATES[1:]]

pytestmark = pytest.mark.timeout(400)


def submit(cluster: SlurmCluster, folder: Path, template: str, *arguments: str, on_each: int = 2) -> str:
    """A job of two ranks on each of two nodes, or of one, in a folder that looks like the repository's."""
    folder.mkdir(exist_ok=True)
    (folder / ".venv").symlink_to(sys.prefix)
    for name in ("recipes", "slurm"):
        (folder / name).symlink_to(REPOSITORY / name)
    options = [f"--nodes={on_each}", f"--ntasks-per-node={on_each}", "--output=out", "--error=err"]
    script = f"slurm/{template}.sbatch"
    return cluster.run("sbatch", "--parsable", *options, script, *PLAN, *arguments, cwd=folder).strip()


def wait_for_end(cluster: SlurmCluster, job: str, *, timeout_s: float) -> None:
    wait_for("the job to end", lambda: not cluster.run("squeue", "--noheader", f"--jobs={job}"), timeout_s=timeout_s)


def ranks_on(node: str) -> list[int]:
    """srun and mpirun start the command itself, torchrun starts a Python for it."""
    return [pid for program in ("auto3d", "python", "python3") for pid in pids(node, program)]


@cache
def trained_here(cluster: SlurmCluster, *arguments: str) -> dict:
    """The record of a training on this machine; it is the same for all templates, so it runs once."""
    return json.loads(cluster.run(*AUTO3D, "train", *PLAN, *arguments, timeout_s=200))


@pytest.mark.parametrize("template", [TEMPLATES[0], *OTHERS])
def test_losses_are_those_of_this_machine(cluster, tmp_path, template):
    job = submit(cluster, tmp_path, template, *THREE)
    here = trained_here(cluster, HERE, *THREE)
    wait_for_end(cluster, job, timeout_s=300)
    out = (tmp_path / "out").read_text()
    assert out, (tmp_path / "err").read_text()
    on_nodes = json.loads(out)
    assert len(on_nodes["loss"]) == 3
    assert (on_nodes["loss"], on_nodes["grad_norm"]) == (here["loss"], here["grad_norm"])


@pytest.mark.parametrize("template", [TEMPLATES[0], *OTHERS])
def test_a_killed_rank_ends_all(cluster, tmp_path, template):
    job = submit(cluster, tmp_path, template, SMALL, "training.iterations=1000000", "training.log_every=1")
    errors = tmp_path / "err"
    wait_for("iterations", lambda: errors.exists() and "iteration 2/" in errors.read_text(), timeout_s=200)
    nodes = cluster.run("squeue", "--noheader", f"--jobs={job}", "--format=%N")
    first, second = cluster.run("scontrol", "show", "hostnames", nodes.strip()).split()
    assert [len(ranks_on(node)) for node in (first, second)] == [2, 2]
    os.kill(ranks_on(second)[0], signal.SIGKILL)
    wait_for_end(cluster, job, timeout_s=30)
    assert "JobState=FAILED" in cluster.run("scontrol", "show", "job", job)
    wait_for("all ranks to be gone", lambda: not ranks_on(first) + ranks_on(second), timeout_s=10)


@pytest.mark.soak
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("plan", [[], ONE], ids=["four ranks", "one rank"])
def test_a_preempted_job_goes_on_where_it_was(cluster, tmp_path, template, plan):
    training = ["training.iterations=100", "training.log_every=1", *plan]
    job = submit(cluster, tmp_path, template, *training, on_each=1 if plan else 2)
    errors = tmp_path / "err"
    wait_for("iterations", lambda: errors.exists() and "iteration 20/" in errors.read_text(), timeout_s=200)
    cluster.run("srun", "--partition=high", "--exclusive", "--nodes=4", "true", timeout_s=120)
    cluster.start_soon(job)
    wait_for_end(cluster, job, timeout_s=200)
    told = errors.read_text()
    assert "it is requeued, and will continue from its checkpoint" in told
    numbers = [int(found) for found in re.findall(r"^iteration (\d+)/", told, re.MULTILINE)]
    assert numbers == list(range(1, 101)), "each ran once"
    here = trained_here(cluster, HERE, *training)
    record = json.loads((tmp_path / "out").read_text())
    assert record["loss"] == here["loss"][record["first_iteration"] :]
