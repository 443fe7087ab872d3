"""Few cases in place of many: every two values of two axes still meet in one of them."""

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

import numpy as np

Case = Mapping[str, str | int]  # axis -> value


def pairs(case: Case) -> list[tuple]:
    """Every two axes of ``case``, each with its value."""
    return list(combinations(sorted(case.items(), key=lambda item: item[0]), 2))


def pairwise_cover(cases: Sequence[Case]) -> list[int]:
    """Positions of some of ``cases`` in which every pair occurs that occurs in any; chosen greedily, so nearly fewest.

    What cannot go together is simply not among ``cases``. A case need not have every axis.
    """
    number: dict[tuple, int] = {}
    held = [[number.setdefault(pair, len(number)) for pair in pairs(case)] for case in cases]
    longest = max(len(own) for own in held)
    filler = len(number)
    table = np.array([own + [filler] * (longest - len(own)) for own in held])
    missing = np.ones(len(number) + 1, dtype=bool)
    missing[filler] = False
    chosen = []
    while missing.any():
        best = int(missing[table].sum(axis=1).argmax())
        chosen.append(best)
        missing[table[best]] = False
    return chosen


def sample_of(cases: Sequence[Case], *, once: Collection[str]) -> list[int]:
    """Positions of some of ``cases``: every value of the axes ``once``, and every pair of values of the other axes."""
    chosen = pairwise_cover([{axis: value for axis, value in case.items() if axis not in once} for case in cases])
    for axis in once:
        for position, case in enumerate(cases):
            if axis in case and case[axis] not in {cases[each].get(axis) for each in chosen}:
                chosen.append(position)
    return chosen
