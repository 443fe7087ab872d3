"""Exhaustive search: bounds the whole space, and looks only at candidates that can be among the best."""

from heapq import heapify, heappop, heappush, heapreplace
from math import inf

from auto3d.search.first_fit import find_first_fit
from auto3d.search.search import Left, Search
from auto3d.search.space import Candidate

_PROMISED, _BOUNDED = range(2)  # what is known of a candidate in the queue


def exhaustive(search: Search, seed: int) -> None:
    """Go through the candidates in the order of lower bounds of their time, until no other can be among the best.

    A candidate is known first by the promise of its degrees, then by its own, then by the bound of its Plan, and is
    simulated last: whatever has the lowest bound so far goes one step on. So the search ends once ``budget.best`` plans
    are faster than the lowest bound, and those are the fastest of the space; and where the budget ends it before, it
    has looked at what promised most. ``seed`` has no effect.
    """
    find_first_fit(search)
    domain, promises = search.domain, search.promises
    degrees = [(promises.least_of_degrees_s(domain, one), number, one) for number, one in enumerate(domain.degrees)]
    heapify(degrees)
    queue: list[tuple[float, int, int, Candidate]] = []  # bound, a number that breaks ties, what is known, candidate
    numbered = 0
    while degrees or queue:
        least = min(queue[0][0] if queue else inf, degrees[0][0] if degrees else inf)
        if least > search.limit() or search.spent:
            break
        if degrees and degrees[0][0] <= least:
            _, _, one = heappop(degrees)
            for candidate in domain.variants(one):
                heappush(queue, (promises.least_s(candidate), numbered, _PROMISED, candidate))
                numbered += 1
            continue
        _, number, known, candidate = queue[0]
        if known == _PROMISED:
            bound = search.bound(candidate)
            if bound < inf:
                heapreplace(queue, (bound, number, _BOUNDED, candidate))
                continue
        else:
            search.seconds(candidate)
        heappop(queue)
    unseen = [bound for bound, _, _, candidate in queue if not search.has_seen(candidate)]
    unmade = [(bound, count) for bound, _, one in degrees if (count := search.unseen_of(one))]
    search.left = Left(
        candidates=len(unseen) + sum(count for _, count in unmade),
        least_s=min([*unseen, *(bound for bound, _ in unmade)], default=inf),
    )
