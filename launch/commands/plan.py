"""`auto3d plan`."""

import click

from auto3d.garbage import garbage_collection_paused
from launch.commands.consoles import err
from launch.commands.exit_codes import INTERRUPTED
from launch.commands.options import load_for, recipe_command
from launch.console.progress import search_progress
from launch.console.ranking import print_plans
from launch.model.search import search_recipe


@recipe_command
@click.option("--json", "as_json", is_flag=True, help="Print one record, in seconds and bytes, with the best plans.")
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="Print all plans, not only twenty, and which candidates are the same.",
)
def plan(recipe: str, overrides: tuple[str, ...], as_json: bool, show_all: bool) -> int:
    """Search for the fastest plan by prediction; train nothing.

    It prints the best plans of RECIPE's search space and says why the best is best. search.algorithm is exhaustive,
    annealing, random, megatron, rannc, amp or chimera; search.candidates, search.simulations and search.seconds limit
    the search. Ctrl-C ends it, and the best plans so far are printed.
    """
    with garbage_collection_paused():
        loaded = load_for("plan", recipe, overrides)
        with search_progress(err) as tell:
            search = search_recipe(loaded, tell, keep_interrupted=True)
        print_plans(loaded, search, as_json=as_json, show_all=show_all)
    return INTERRUPTED if search.interrupted else 0
