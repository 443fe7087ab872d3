"""Whether a recipe's trials and trainings run as jobs of SLURM or on this machine."""

import os
from functools import cache

from launch.recipe.load import LoadedRecipe
from launch.recipe.schema_key import AUTO
from launch.slurm.client import SlurmError, run

SINFO_S = 20.0


def on_slurm(recipe: LoadedRecipe) -> bool:
    """Whether trials run as jobs of SLURM.

    With ``auto`` they do if a cluster answers and this process is not inside a job, whose nodes it uses directly.
    """
    wanted = recipe.values.launch.executor
    if wanted == AUTO:
        return not in_a_job() and not why_no_slurm()
    return wanted == "slurm"


def in_a_job() -> bool:
    """Whether this process runs inside a SLURM job."""
    return "SLURM_JOB_ID" in os.environ


def check_reachable(recipe: LoadedRecipe) -> None:
    """Raise RecipeError if trials should run as jobs of SLURM but no cluster answers."""
    if on_slurm(recipe) and (reason := why_no_slurm()):
        raise recipe.error(
            "launch.executor", f"SLURM cannot be used: {reason}; use local to run trials on this machine"
        )


@cache
def why_no_slurm() -> str:
    """Why SLURM cannot be used; empty if a cluster answers. An installed srun alone proves nothing."""
    try:
        partitions = run(["sinfo", "--all", "--noheader", "--format=%P"], limit_s=SINFO_S).stdout
    except SlurmError as error:
        return str(error)
    return "" if partitions.strip() else "sinfo lists no partition"
