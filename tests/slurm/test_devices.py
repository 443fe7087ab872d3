"""Each rank sees the GPUs that it should, as SLURM binds fake ones: per node, per task, and of two trials at once."""

import json
import sys
from pathlib import Path
from shlex import join

import pytest

from tests.fake_gpus import WITNESS, Seen, seen_in, write_nvidia_smi
from tests.slurm.conftest import REPOSITORY, SlurmCluster, wait_for
from tests.slurm.sweeps import Sweeps

pytestmark = pytest.mark.timeout(400)

GPUS = ["cluster.device=cuda", "training.check_capture=false", "launch.exclusive=false", "launch.cpus_per_node=1"]


def ranks_of(sweeps: Sweeps, *changes: str, expected: int) -> list[Seen]:
    """What the ranks of a sweep saw, which end as failed, for want of a GPU; so many are there at once."""
    (sweeps.folder / "witness.py").write_text(WITNESS)
    path = write_nvidia_smi(sweeps.folder / "bin")
    model = ["model.factory=witness:make", f"model.arguments={{expected: {expected}, folder: {sweeps.folder}}}"]
    setup = f"launch.setup={json.dumps([f'export PATH={path}:$PATH'])}"
    sweeps.auto3d("sweep", *model, *GPUS, setup, *changes, code=1)
    seen = seen_in(sweeps.folder)
    assert len(seen) == expected
    return seen


@pytest.fixture
def sweeps(cluster, tmp_path):
    return Sweeps(cluster, tmp_path)


# The suite has two trials at once on one node, and a training on two nodes that asks for GPUs by name.
@pytest.mark.soak
@pytest.mark.parametrize("asked", ["launch.gpus_per_node=2", "launch.gres=gpu:2", "cluster.accelerator=null"])
def test_ranks_of_a_trial_see_the_gpus_of_their_node(sweeps, asked):
    """As many as were asked for by name, or as there are ranks on a node."""
    shape = ["cluster.nodes=2", "cluster.devices_per_node=2", "search.dp=[2]", "launch.nodelist=n[1-2]"]
    seen = ranks_of(sweeps, *shape, asked, expected=4)
    assert [(one.rank, one.host, one.devices) for one in seen] == [
        (0, "n1", "0,1"),
        (1, "n1", "0,1"),
        (2, "n2", "0,1"),
        (3, "n2", "0,1"),
    ]


def test_two_trials_at_once_on_one_node_share_no_gpu(sweeps):
    shape = ["cluster.nodes=1", "cluster.devices_per_node=2", "launch.nodelist=n1", "search.micro_batch_size=[2,4]"]
    seen = ranks_of(sweeps, *shape, expected=4)
    assert len({one.trial for one in seen}) == 2
    assert sorted((one.rank, one.devices) for one in seen) == [(0, "0,1"), (0, "2,3"), (1, "0,1"), (1, "2,3")]
    assert len({(one.trial, one.devices) for one in seen}) == 2, "both ranks of a trial see the same"


# slurm/train.sbatch, where srun starts each rank


def submit(cluster: SlurmCluster, folder: Path, *options: str) -> str:
    """A job by the template, whose ranks say which GPU they took; it prints to `out` and `err` of ``folder``."""
    command = folder / ".venv" / "bin" / "auto3d"
    command.parent.mkdir(parents=True)
    script = REPOSITORY / "tests" / "slurm" / "find_gpu.py"
    tools = write_nvidia_smi(folder / "bin")
    command.write_text(f"#!/bin/sh\nPATH={tools}:$PATH exec {join([sys.executable, str(script)])}\n")
    command.chmod(0o755)
    (folder / "slurm").symlink_to(REPOSITORY / "slurm")
    template = "slurm/train.sbatch"
    return cluster.run("sbatch", "--parsable", *options, "--output=out", "--error=err", template, cwd=folder).strip()


def test_each_rank_of_a_training_takes_a_gpu_of_its_own_or_is_refused(cluster, tmp_path):
    """Bound to its task by SLURM, or picked by the rank among all of its node's. The three jobs run together."""
    bound, picked, same = (tmp_path / name for name in ("bound", "picked", "same"))
    jobs = [
        submit(cluster, bound, "--nodes=1", "--nodelist=n1", "--ntasks-per-node=2", "--gpus-per-task=1"),
        submit(cluster, picked, "--nodes=2", "--nodelist=n[3-4]", "--ntasks-per-node=2", "--gpus-per-node=2"),
        submit(cluster, same, "--nodes=1", "--nodelist=n2", "--ntasks-per-node=2", "--gpus-per-node=1"),
    ]
    left = ["squeue", "--noheader", f"--jobs={','.join(jobs)}"]
    wait_for("the jobs to end", lambda: not cluster.run(*left), timeout_s=200)
    for folder, nodes in {bound: ["n1"], picked: ["n3", "n4"]}.items():
        expected = [f"{node} {rank} {rank}" for node in nodes for rank in (0, 1)]
        assert sorted((folder / "out").read_text().splitlines()) == expected
    told = "ranks 0 and 1 on n2 have the same GPU, 0; start as many ranks on a node as there are GPUs"
    assert told in (same / "err").read_text()
