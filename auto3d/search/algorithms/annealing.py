"""AMP's randomized optimization: simulated annealing over candidates (Li et al. 2022, section 4.4, algorithm 1).

As in the paper, a move changes the tensor- or the data-parallel degree; the pipeline depth follows, and the micro-batch
size and placement are drawn anew. ``pipe_dp`` (layer-assignment) cuts the stages if the partition axis has it. Half of
the moves change a single choice instead, such as the schedule, which AMP's space does not have. Errors in its listing:

- Lines 8 and 18 use ``randn()``, a normal variate, instead of a uniform variate from 0 to 1.
- ``pipe_dp(s)`` cuts stages for the strategy before the move; here stages are cut for the strategy after it.
- ``cost - new_cost`` is in seconds, so the meaning of an initial temperature of 1 depends on the model: iterations of
  minutes would freeze at once, iterations of milliseconds accept everything. Here the difference is relative to the
  current cost.
- The first strategy is never recorded, and the last line of the loop over trials does not look at ``record[0]``.
"""

from collections import defaultdict
from dataclasses import replace
from math import inf, log
from random import Random

from auto3d.search.algorithms.random_search import random_candidate
from auto3d.search.axes import DEGREES, Candidate
from auto3d.search.first_fit import find_first_fit
from auto3d.search.search import Search
from auto3d.search.space import Domain

WARM, COLD = 0.3, 0.003  # first and last temperature, relative to the current time
_ROUNDS = 4  # number of coolings, which begin at the best candidate so far


def annealing(search: Search, seed: int) -> None:
    """Look at as many candidates as the budget allows, first at a candidate that fits."""
    random = Random(seed)
    moves = _Moves(search.domain, random)
    best = find_first_fit(search)
    present: Candidate | None = None
    cost = least = inf if best is None else search.seconds(best)
    length = max(1, search.budget.candidates // _ROUNDS)
    for step in range(search.budget.candidates):
        if search.spent:
            break
        if step % length == 0:
            present, cost = best, least
        candidate = random_candidate(search.domain, random) if present is None else moves.from_(present)
        temperature = WARM * (COLD / WARM) ** (step % length / length)
        seconds = accepted_s(search, candidate, random, present_s=cost, temperature_s=temperature * cost)
        if seconds is None:
            continue
        present, cost = candidate, seconds
        if seconds < least:
            best, least = candidate, seconds
    search.leave_unseen()


def accepted_s(
    search: Search, candidate: Candidate, random: Random, *, present_s: float, temperature_s: float
) -> float | None:
    """The estimate of ``candidate`` if simulated annealing moves to it from one of ``present_s`` seconds; else None.

    A candidate that is d seconds slower is accepted with probability exp(-d / ``temperature_s``); from infinity, every
    possible candidate is. The random number is drawn before the estimate: a candidate whose lower bound is already too
    high is rejected without a simulation.
    """
    highest = inf if present_s == inf else present_s - temperature_s * log(1 - random.random())
    bound = search.bound(candidate)
    if bound == inf or bound > highest:
        return None
    seconds = search.seconds(candidate)
    return seconds if seconds <= highest else None


class _Moves:
    def __init__(self, domain: Domain, random: Random) -> None:
        self._domain, self._random = domain, random
        self._by: dict[str, defaultdict[tuple, list[Candidate]]] = {}
        for name, keys in (("tp", ("tp",)), ("dp", ("dp",)), ("micro_batch_size", ("dp", "tp", "pp", "replicas"))):
            self._by[name] = defaultdict(list)
            for degrees in domain.degrees:
                self._by[name][tuple(getattr(degrees, key) for key in keys)].append(degrees)

    def from_(self, present: Candidate) -> Candidate:
        """A neighbour of ``present``."""
        random = self._random
        if random.random() < 0.5:
            kept = "tp" if random.random() < 0.5 else "dp"
            neighbour = self._degrees(present, random.choice(self._by[kept][getattr(present, kept),]))
            return replace(neighbour, placement=random.choice(self._domain.choices["placement"]))
        choices = self._domain.choices_of(present)
        names = ["micro_batch_size", *(name for name, values in choices.items() if len(values) > 1)]
        name = random.choice(names)
        if name == "micro_batch_size":
            same = self._by[name][present.dp, present.tp, present.pp, present.replicas]
            return replace(present, micro_batch_size=random.choice(same).micro_batch_size)
        return replace(present, **{name: random.choice(choices[name])})

    def _degrees(self, present: Candidate, degrees: Candidate) -> Candidate:
        """``present`` with other degrees; a choice that does not exist for them is drawn anew."""
        changed = replace(present, **{name: getattr(degrees, name) for name in DEGREES})
        for name, values in self._domain.choices_of(changed).items():
            if getattr(changed, name) not in values:
                changed = replace(changed, **{name: self._random.choice(values)})
        return changed
