"""Exhaustive search: looks at the whole space and simulates only plans that can be among the best."""

from collections.abc import Iterable
from math import inf

from auto3d.search.search import Search
from auto3d.search.space import Candidate


def exhaustive(search: Search, seed: int) -> None:
    """Look at every candidate that the budget allows, then simulate them in the order of their lower bounds.

    The search ends once the next bound is above the estimates of ``budget.best`` plans: no remaining plan can be
    faster. ``seed`` has no effect.
    """
    bounds: list[tuple[float, int, Candidate]] = []
    for candidate in search.domain:
        if search.spent:
            break
        bound = search.bound(candidate)
        if bound < inf:
            bounds.append((bound, len(bounds), candidate))
    estimate_best(search, bounds)


def estimate_best(search: Search, bounds: Iterable[tuple[float, int, Candidate]]) -> None:
    """Simulate candidates, given as (bound, index, candidate), until no other can be among the best or time is up."""
    for bound, _, candidate in sorted(bounds, key=lambda one: one[:2]):
        if bound > search.limit() or search.elapsed_s > search.budget.seconds:
            break
        search.seconds(candidate)
