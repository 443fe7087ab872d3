"""Exhaustive search: the whole space; what cannot be among the best is not simulated."""

from math import inf

from auto3d.search.search import Search


def exhaustive(search: Search, seed: int) -> None:
    """Look at every candidate, as far as the budget goes, then simulate them in the order of their lower bounds.

    It ends where the next bound is above the estimates of as many plans as are asked for: no plan that is left can be
    faster. ``seed`` is for the other algorithms.
    """
    bounds = []
    for candidate in search.domain:
        if search.spent:
            break
        bound = search.bound(candidate)
        if bound < inf:
            bounds.append((bound, len(bounds), candidate))
    for bound, _, candidate in sorted(bounds):
        if bound > search.limit() or search.elapsed_s > search.budget.seconds:
            break
        search.seconds(candidate)
