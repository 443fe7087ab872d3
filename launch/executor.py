"""Where a recipe's trials run: as jobs of SLURM, or here."""

from functools import cache

from launch.recipe import LoadedRecipe
from launch.schema import AUTO
from launch.slurm_commands import SlurmError, run

SINFO_S = 20.0


def on_slurm(recipe: LoadedRecipe) -> bool:
    """Whether trials run as SLURM's jobs; auto: if a cluster answers."""
    wanted = recipe.values.launch.executor
    return not why_no_slurm() if wanted == AUTO else wanted == "slurm"


def check_reachable(recipe: LoadedRecipe) -> None:
    """Raise RecipeError if trials should run as SLURM's jobs, and no cluster answers."""
    if on_slurm(recipe) and (reason := why_no_slurm()):
        raise recipe.error("launch.executor", f"SLURM cannot be used: {reason}; local runs trials on this machine")


@cache
def why_no_slurm() -> str:
    """Empty if a SLURM cluster answers. That srun is installed would say nothing."""
    try:
        partitions = run(["sinfo", "--noheader", "--format=%P"], timeout_s=SINFO_S).stdout
    except SlurmError as error:
        return str(error)
    return "" if partitions.strip() else "sinfo names no partition"
