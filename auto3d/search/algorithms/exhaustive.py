"""Exhaustive search: the whole space; what cannot be among the best is not simulated."""

from collections.abc import Iterable
from math import inf

from auto3d.search.search import Search
from auto3d.search.space import Candidate


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
    estimate_best(search, bounds)


def estimate_best(search: Search, bounds: Iterable[tuple[float, int, Candidate]]) -> None:
    """Simulate candidates, each with its bound and its place, until no other can be among the best, or time is up."""
    for bound, _, candidate in sorted(bounds, key=lambda one: one[:2]):
        if bound > search.limit() or search.elapsed_s > search.budget.seconds:
            break
        search.seconds(candidate)
