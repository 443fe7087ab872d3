"""Arguments and options that several commands share."""

from collections.abc import Callable, Sequence

import click

from auto3d.search.algorithms import AMP
from auto3d.search.placement import AMP_PLACEMENTS, PLACEMENTS
from launch.commands.consoles import note
from launch.recipe.load import LoadedRecipe, load
from launch.recipe.overrides import read_overrides, write_path
from launch.recipe.schema_key import AUTO

UNREAD = {  # verb -> keys, or groups of them, that change nothing of what it does
    "plan": ("plan", "measure", "launch", "search.max_trials", "search.planners"),
    "sweep": ("plan", "search.trials"),
    "tune": ("plan", "search.max_trials", "search.planners"),
}
OF_PLANNERS = {  # key -> the search algorithms that read it
    "search.rannc_blocks": ("rannc", "rannc-any-depth"),
    "search.rannc_smallest_micro_batch": ("rannc", "rannc-any-depth"),
    "search.amp_cooling": (AMP,),
}
COUNT = click.IntRange(min=1)
EXISTING_FILE = click.Path(exists=True, dir_okay=False)
OUTPUT_FILE = click.Path(dir_okay=False)

# Options of the commands that start trials or trainings
retry = click.option("--retry", is_flag=True, help="Run failed and timed-out trials again.")
detach = click.option(
    "--detach", is_flag=True, help="Return as soon as the run has started, and print how to follow it."
)
dry_run = click.option("--dry-run", is_flag=True, help="Print the sbatch text of each job; submit none.")
test_only = click.option("--test-only", is_flag=True, help="Ask SLURM whether it would accept the jobs; submit none.")


def load_for(verb: str, recipe: str, overrides: Sequence[str]) -> LoadedRecipe:
    """The recipe for ``verb``; a line names every override that has no effect there."""
    loaded = load(recipe, overrides)
    for path in read_overrides(overrides):
        written = write_path(path)
        if any(written == key or written.startswith(f"{key}.") for key in UNREAD[verb]):
            note(f"{written} has no effect on `auto3d {verb}`")
        elif readers := _missing_readers(loaded, verb, written):
            note(f"{written} has no effect: only {readers} reads it")
    return loaded


def _missing_readers(recipe: LoadedRecipe, verb: str, key: str) -> str:
    """What alone reads ``key``, if ``verb`` runs none of it; else empty."""
    search = recipe.values.search
    planners = {search.algorithm, *(() if "search.planners" in UNREAD[verb] else search.planners)}
    if key in OF_PLANNERS and not planners.intersection(OF_PLANNERS[key]):
        return f"search.algorithm={OF_PLANNERS[key][0]}"
    if key == "search.amp_mesh" and AMP not in planners:
        several = recipe.values.cluster.nodes > 1 or recipe.values.cluster.more
        tried = (PLACEMENTS if several else ()) if search.placement == AUTO else search.placement
        return "" if set(tried) & set(AMP_PLACEMENTS) else "a placement of AMP, such as search.placement=[horizontal],"
    return ""


def recipe_command(function: Callable[..., int]) -> click.Command:
    """A click command, named like ``function``, whose arguments are a recipe and overrides of its keys."""
    function = click.argument("overrides", nargs=-1)(function)
    function = click.argument("recipe")(function)
    return click.command(name=function.__name__)(function)
