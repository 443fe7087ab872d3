"""AMP's randomized optimization: simulated annealing over candidates (Li et al. 2022, section 4.4, algorithm 1).

As in the paper, a move varies the tensor- or the data-parallel degree, the pipeline's depth follows, and micro-batch
size and placement are drawn anew; the stages are assigned by ``pipe_dp`` where the partition axis has it. Half of the
moves change one choice alone, such as the schedule, which AMP's space does not have. What its listing gets wrong:

- ``randn()``, a normal variate, stands where a uniform one from 0 to 1 is meant, in lines 8 and 18.
- ``pipe_dp(s)`` cuts for the strategy that is left; here a move is cut for itself.
- ``cost - new_cost`` is in seconds, so a temperature that starts at 1 depends on the model: an iteration of minutes
  would freeze at once, one of milliseconds accept everything. Here the difference is relative to the present cost.
- The first strategy is never put on record, and the last line of the loop over trials does not look at ``record[0]``.
"""

from collections import defaultdict
from dataclasses import replace
from math import inf, log
from random import Random

from auto3d.search.algorithms.random_search import draw
from auto3d.search.search import Search
from auto3d.search.space import DEGREES, Candidate, Domain

WARM, COLD = 0.3, 0.003  # first and last temperature: a share of the present time
_ROUNDS = 4  # times that it cools; each begins at the best so far


def annealing(search: Search, seed: int) -> None:
    """Look at as many candidates as the budget has.

    The chance is drawn before the estimate: a candidate whose lower bound already misses it is refused unsimulated.
    """
    random = Random(seed)
    moves = _Moves(search.domain, random)
    present, cost = None, inf
    best, least = None, inf
    length = max(1, search.budget.candidates // _ROUNDS)
    for step in range(search.budget.candidates):
        if search.spent:
            break
        if step % length == 0:
            present, cost = best, least
        candidate = draw(search.domain, random) if present is None else moves.from_(present)
        temperature = WARM * (COLD / WARM) ** (step % length / length)
        highest = cost * (1 - temperature * log(1 - random.random())) if present else inf
        bound = search.bound(candidate)
        if bound == inf or bound > highest:
            continue
        seconds = search.seconds(candidate)
        if seconds <= highest:
            present, cost = candidate, seconds
        if seconds < least:
            best, least = candidate, seconds


class _Moves:
    def __init__(self, domain: Domain, random: Random) -> None:
        self._domain, self._random = domain, random
        self._by: dict[str, defaultdict[tuple, list[Candidate]]] = {}
        for name, keys in (("tp", ("tp",)), ("dp", ("dp",)), ("micro_batch_size", ("dp", "tp", "pp", "replicas"))):
            self._by[name] = defaultdict(list)
            for one in domain.degrees:
                self._by[name][tuple(getattr(one, key) for key in keys)].append(one)

    def from_(self, present: Candidate) -> Candidate:
        """A neighbour of ``present``."""
        random = self._random
        if random.random() < 0.5:
            kept = "tp" if random.random() < 0.5 else "dp"
            found = self._degrees(present, random.choice(self._by[kept][getattr(present, kept),]))
            return replace(found, placement=random.choice(self._domain.choices["placement"]))
        choices = self._domain.choices_of(present)
        names = ["micro_batch_size", *(name for name, values in choices.items() if len(values) > 1)]
        name = random.choice(names)
        if name == "micro_batch_size":
            same = self._by[name][present.dp, present.tp, present.pp, present.replicas]
            return replace(present, micro_batch_size=random.choice(same).micro_batch_size)
        return replace(present, **{name: random.choice(choices[name])})

    def _degrees(self, present: Candidate, degrees: Candidate) -> Candidate:
        """``present`` with other degrees, and of each axis a choice that there is for them."""
        changed = replace(present, **{name: getattr(degrees, name) for name in DEGREES})
        for name, values in self._domain.choices_of(changed).items():
            if getattr(changed, name) not in values:
                changed = replace(changed, **{name: self._random.choice(values)})
        return changed
