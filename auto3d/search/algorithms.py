"""Search space and costs -> ranked Plans. Each algorithm is one file; ``ALGORITHMS`` alone knows them by name."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from auto3d.search.search import Search

ALGORITHMS = {  # name -> the file and the function in it; whoever only wants the names does without what they import
    "annealing": "annealing",
    "random": "random_search",
    "megatron": "megatron",
    "exhaustive": "exhaustive",
    "rannc": "rannc",
}


def run_algorithm(name: str, search: "Search", seed: int) -> None:
    """Have the algorithm of this name fill ``search``."""
    function = ALGORITHMS[name]
    getattr(import_module(f"auto3d.search.{function}"), function)(search, seed)
