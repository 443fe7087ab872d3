"""Random search over evenly drawn candidates, the baseline of AMP (Li et al. 2022, section 5)."""

from dataclasses import replace
from math import inf
from random import Random

from auto3d.search.axes import Candidate
from auto3d.search.first_fit import find_first_fit
from auto3d.search.search import Search
from auto3d.search.space import Domain


def random_search(search: Search, seed: int) -> None:
    """Look at as many candidates as the budget allows, and simulate those that may be among the best.

    The first is a candidate that fits.
    """
    random = Random(seed)
    find_first_fit(search)
    seen: set[Candidate] = set()
    while len(seen) < len(search.domain) and not search.spent:
        candidate = random_candidate(search.domain, random)
        if candidate in seen:
            continue
        seen.add(candidate)
        bound = search.bound(candidate)
        if bound < inf and bound <= search.limit():
            search.seconds(candidate)
    search.leave_unseen()


def random_candidate(domain: Domain, random: Random) -> Candidate:
    """A random candidate; each choice is drawn independently."""
    return with_random_choices(random.choice(domain.degrees), domain, random)


def with_random_choices(degrees: Candidate, domain: Domain, random: Random) -> Candidate:
    """``degrees`` with random values of the other axes."""
    choices = domain.choices_of(degrees)
    return replace(degrees, **{name: random.choice(values) for name, values in choices.items()})
