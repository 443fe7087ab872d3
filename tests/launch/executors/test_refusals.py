"""What sbatch says when it refuses a job: a limit of jobs lets the others wait, any other reason does not."""

import pytest

from launch.executors.submit import _refusal
from launch.slurm.client import JobLimitError

POLICY = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"  # noqa: E501


@pytest.mark.parametrize(
    ("printed", "limits_jobs", "words"),
    [
        (f"sbatch: error: AssocMaxSubmitJobLimit\n{POLICY}", True, "time limits) (AssocMaxSubmitJobLimit)"),
        (f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{POLICY}", True, "(QOSMaxSubmitJobPerUserLimit)"),
        (f"sbatch: error: QOSGrpSubmitJobsLimit\n{POLICY}", True, "(QOSGrpSubmitJobsLimit)"),
        (POLICY, True, "Job violates accounting/QOS policy"),
        (f"sbatch: error: QOSMaxWallDurationPerJobLimit\n{POLICY}", False, "(QOSMaxWallDurationPerJobLimit)"),
        (f"sbatch: error: QOSMaxNodePerJobLimit\n{POLICY}", False, "(QOSMaxNodePerJobLimit)"),
        ("sbatch: error: invalid partition specified: gpu", False, "invalid partition specified: gpu"),
        ("", False, "it gave no reason"),
    ],
)
def test_a_refusal(printed, limits_jobs, words):
    found = _refusal(printed)
    assert isinstance(found, JobLimitError) == limits_jobs
    assert words in str(found)
    assert "sbatch: error:" not in str(found)
