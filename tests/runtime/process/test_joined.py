"""Which environments mean that a launcher started this process."""

import pytest

from auto3d.runtime.process.joined import JoinError, joined_world

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
MEET = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


def test_torchrun():
    world = joined_world(TORCHRUN)
    assert (world.rank, world.size, world.local_rank, world.meeting_point) == (3, 8, 1, "tcp://n1:29500")


def test_srun():
    world = joined_world(SRUN | MEET)
    assert (world.rank, world.size, world.local_rank, world.meeting_point) == (2, 4, 0, "tcp://n1:29500")


def test_srun_without_a_place_to_meet_is_refused():
    with pytest.raises(JoinError, match="MASTER_ADDR and MASTER_PORT"):
        joined_world(SRUN)


@pytest.mark.parametrize(
    "environment",
    [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, {"RANK": "0"}, {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}],
    ids=["nothing", "batch script", "stray variable", "srun of one task"],
)
def test_a_process_started_alone(environment):
    assert joined_world(environment) is None


@pytest.mark.parametrize(
    "environment",
    [
        {**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "2"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
    ids=["shell of salloc", "batch script submitted from that shell", "srun --mpi=pmi2 of one task"],
)
def test_slurm_variables_without_ranks(environment):
    assert joined_world(environment) is None
