"""RaNNC's search over all numbers of stages, where the paper stops at the fewest that fit (algorithm 2, line 16)."""

from auto3d.search.algorithms.rannc import estimate_plan
from auto3d.search.search import Search


def rannc_any_depth(search: Search, seed: int) -> None:
    """Estimate the fastest plan that RaNNC's dynamic programme finds; raises InputError if it finds none.

    It differs from ``rannc`` in the number of stages and of nodes per pipeline alone. ``seed`` has no effect.
    """
    estimate_plan(search, any_depth=True)
