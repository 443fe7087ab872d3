"""Trainings on a real cluster continue after preemption, their time limit, and the death of a node."""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from auto3d.runtime.checkpoint.format import newest
from tests.slurm.conftest import wait_for
from tests.slurm.sweeps import Sweeps, end

ITERATIONS = 1500
PLAN = [
    "plan.pp=2",
    "plan.micro_batch_size=4",
    f"training.iterations={ITERATIONS}",
    "training.checkpoint_every=500",
]
EACH = "training.log_every=1"
QUIET = "training.log_every=1500"  # nobody reads its pipe until it has ended
HERE = ["launch.executor=local", "cluster.nodes=1", "cluster.devices_per_node=2"]

pytestmark = pytest.mark.timeout(900)


class Trainings(Sweeps):
    @property
    def checkpoints(self) -> Path | None:
        return next(self.folder.glob("runs/own/checkpoints/train-*"), None)

    def saved(self) -> int:
        """The number of iterations at the newest checkpoint."""
        return (newest(self.checkpoints) if self.checkpoints else None) or 0

    def iterations(self) -> list[int]:
        """The numbers of the iterations that the job printed in all of its starts."""
        (log,) = self.folder.glob("runs/own/jobs/*/*_0_log.out")
        return [int(found) for found in re.findall(r"^iteration (\d+)/", log.read_text(), re.MULTILINE)]


@pytest.fixture
def trainings(cluster, emptied_folder):
    return Trainings(cluster, emptied_folder)


def final_state(folder: Path) -> dict:
    files = sorted((folder / f"iteration-{ITERATIONS:08d}").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same(state: dict, expected: dict) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.equal(state[name]), name


def test_a_preempted_training_goes_on_where_it_was(trainings, tmp_path_factory):
    """It leaves the checkpoint that the same training leaves on this machine."""
    undisturbed = Trainings(trainings.cluster, tmp_path_factory.mktemp("undisturbed"))
    both = [
        trainings.start("train", *PLAN, EACH, "launch.nodelist=n1,n2"),
        undisturbed.start("train", *PLAN, *HERE, QUIET),
    ]
    wait_for("the first checkpoint", lambda: trainings.saved() >= 500, timeout_s=200)
    job = trainings.job()
    trainings.cluster.run("srun", "--partition=high", "--exclusive", "--nodelist=n1,n2", "true")
    saved = trainings.saved()
    assert saved % 500, "it left a checkpoint when it was warned"
    trainings.cluster.start_soon(job)
    told, _ = (end(one) for one in both)
    assert trainings.iterations() == list(range(1, ITERATIONS + 1)), "each ran once"
    assert trainings.starts() == [1], "it stayed the same job"
    assert f"{ITERATIONS - saved} iterations under " in told
    assert_same(final_state(trainings.checkpoints), final_state(undisturbed.checkpoints))
