"""Exhaustive search: bounds the whole space, and looks only at candidates that can be among the best."""

from heapq import heapify, heappop, heappush
from math import inf

from auto3d.search.axes import Candidate
from auto3d.search.first_fit import find_first_fit
from auto3d.search.search import Left, Search

_LOOKS = 16  # most looks before the best Plan so far is simulated, though other candidates promise more

Entry = tuple[float, int, Candidate]  # lower bound, a number that breaks ties, candidate


def exhaustive(search: Search, seed: int) -> None:
    """Go through the candidates in the order of lower bounds of their time, until no other can be among the best.

    A candidate is known first by the promise of its degrees, then by its own, then by the bound of its Plan, and is
    simulated last: whatever has the lowest bound so far goes one step on. In between, the Plan with the lowest bound is
    simulated after every few looks, so that the search has good plans wherever its budget ends it. It ends by itself
    once ``budget.best`` plans are faster than the lowest bound, and those are the fastest of the space. ``seed`` has no
    effect.
    """
    find_first_fit(search)
    domain, promises = search.domain, search.promises
    degrees = [
        (promises.least_of_degrees_s(domain, combination), number, combination)
        for number, combination in enumerate(domain.degrees)
    ]
    heapify(degrees)
    promised: list[Entry] = []
    bounded: list[Entry] = []
    numbered = looks = 0
    while degrees or promised or bounded:
        of_degrees, of_promised, of_bounded = (queue[0][0] if queue else inf for queue in (degrees, promised, bounded))
        least = min(of_degrees, of_promised, of_bounded)
        if least > search.limit() or search.spent:
            break
        if of_bounded == least or (looks >= _LOOKS and of_bounded <= search.limit()):
            search.seconds(heappop(bounded)[-1])
            looks = 0
        elif of_degrees == least:
            for candidate in domain.variants(heappop(degrees)[-1]):
                heappush(promised, (promises.least_s(candidate), numbered, candidate))
                numbered += 1
        else:
            _, number, candidate = heappop(promised)
            bound = search.bound(candidate)
            if bound < inf:
                heappush(bounded, (bound, number, candidate))
                looks += 1
    unseen = [bound for bound, _, candidate in promised if not search.has_seen(candidate)]
    unmade = [(bound, count) for bound, _, combination in degrees if (count := search.unseen_of(combination))]
    search.left = Left(
        candidates=len(unseen) + sum(count for _, count in unmade),
        least_s=min([*unseen, *(bound for bound, _ in unmade)], default=inf),
    )
