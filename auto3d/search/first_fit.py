"""The first thing that a search makes sure of: one plan that fits the memory of its devices."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf

from auto3d.search.axes import AXES, CHOICES, Candidate
from auto3d.search.search import Search
from auto3d.search.synthesized import is_sought

_OF_MEMORY = tuple(name for name in CHOICES if AXES[name].bounds_memory)


def find_first_fit(search: Search) -> Candidate | None:
    """Look at candidates until a candidate fits, and estimate it; None if the budget or the candidates end first.

    The candidate that is expected to need the least memory comes first.
    """
    for candidate in _leanest_first(search):
        if search.spent:
            return None
        if search.bound(candidate) < inf and search.seconds(candidate) < inf:
            return candidate
    return None


def _leanest_first(search: Search) -> Iterator[Candidate]:
    """All candidates. The last are candidates whose order has to be sought, which takes long.

    Candidates that are expected to need equally much have the order of the domain.
    """
    kinds: list[tuple[float, int, Candidate]] = []
    for degrees in search.domain.degrees:
        choices = search.domain.choices_of(degrees)
        for values in product(*(choices[name] for name in _OF_MEMORY)):
            kind = replace(degrees, **dict(zip(_OF_MEMORY, values, strict=True)))
            kinds.append((search.promises.expected_bytes(kind), len(kinds), kind))
    ordered = [kind for _, _, kind in sorted(kinds, key=lambda entry: entry[:2])]
    for sought in (False, True):
        for kind in ordered:
            for candidate in search.domain.variants(kind):
                alike = all(getattr(candidate, name) == getattr(kind, name) for name in _OF_MEMORY)
                if alike and is_sought(candidate) == sought:
                    yield candidate
