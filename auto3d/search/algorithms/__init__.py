"""The table of search algorithms: ``ALGORITHMS`` is the only place that knows them by name.

An algorithm is a file of this folder and a line here. The file defines a function that gets a Search, which holds the
search space, the maker of plans and the budget, and a seed. The function asks the Search to estimate candidates; the
Search keeps the best.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from auto3d.search.search import Search

AMP = "amp"  # the algorithm with a search space of its own
AMP_ITERATIONS, AMP_TRIALS = 500, 10  # steps of its annealing; real trials (Li et al. 2022, section 5)
ALGORITHMS = {  # name -> the file and its function of the same name; imported at first use, so the names are cheap
    "annealing": "annealing",
    "random": "random_search",
    "megatron": "megatron",
    "exhaustive": "exhaustive",
    "rannc": "rannc",
    "rannc-any-depth": "rannc_any_depth",
    AMP: "amp",
    "chimera": "chimera",
}


def run_algorithm(name: str, search: "Search", seed: int) -> None:
    """Run the algorithm called ``name`` on ``search``, which then holds what the algorithm estimated."""
    function = ALGORITHMS[name]
    getattr(import_module(f"{__name__}.{function}"), function)(search, seed)
