"""Where a recipe's trials and trainings run: as jobs of SLURM, or here."""

import os
from functools import cache

from launch.recipe.load import LoadedRecipe
from launch.recipe.schema import AUTO
from launch.slurm.client import SlurmError, run

SINFO_S = 20.0


def on_slurm(recipe: LoadedRecipe) -> bool:
    """Whether trials run as SLURM's jobs; auto: if a cluster answers, and we are not in a job, whose nodes are ours."""
    wanted = recipe.values.launch.executor
    if wanted == AUTO:
        return not in_a_job() and not why_no_slurm()
    return wanted == "slurm"


def in_a_job() -> bool:
    """Whether this process is in a job of SLURM's."""
    return "SLURM_JOB_ID" in os.environ


def check_reachable(recipe: LoadedRecipe) -> None:
    """Raise RecipeError if trials should run as SLURM's jobs, and no cluster answers."""
    if on_slurm(recipe) and (reason := why_no_slurm()):
        raise recipe.error("launch.executor", f"SLURM cannot be used: {reason}; local runs trials on this machine")


@cache
def why_no_slurm() -> str:
    """Empty if a SLURM cluster answers. That srun is installed would say nothing."""
    try:
        partitions = run(["sinfo", "--all", "--noheader", "--format=%P"], timeout_s=SINFO_S).stdout
    except SlurmError as error:
        return str(error)
    return "" if partitions.strip() else "sinfo names no partition"
