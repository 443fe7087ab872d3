"""The Search that every algorithm works on: estimates of candidates within a budget, and their ranking."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from time import process_time

from auto3d.cost.model import CostModel
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.search.bound import least_of_any_order_s, least_s
from auto3d.search.make import PlanMaker
from auto3d.search.space import Candidate, Domain, Refusals
from auto3d.search.synthesized import is_sought


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The budget of one search. ``seconds`` caps its processor time; without a cap, equal seeds give equal results."""

    candidates: int  # number of candidates to look at
    seconds: float = inf
    best: int = 10  # number of best plans to return; an exhaustive search must not lose any of them


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A candidate with its Plan and the predicted seconds of an iteration."""

    candidate: Candidate
    plan: Plan
    seconds: float


class Search:
    """Makes Plans of the candidates that an algorithm asks for, and estimates each once.

    ``seconds_of`` estimates a Plan (default: the maker's cost model) and is never below ``bound_of`` (default: a time
    that no simulation beats; if the cost model does not simulate, the estimate itself). ``tell`` is called with the
    progress: the number of candidates looked at, the best time so far, and whether an order is sought now.
    """

    def __init__(
        self,
        domain: Domain,
        maker: PlanMaker,
        budget: Budget,
        *,
        seconds_of: Callable[[Plan], float] | None = None,
        bound_of: Callable[[Plan], float] | None = None,
        tell: Callable[[int, float, bool], None] | None = None,
    ) -> None:
        self.domain, self.maker, self.budget = domain, maker, budget
        model: CostModel = maker.model
        self._seconds_of = seconds_of or lru_cache(None)(model.seconds)
        self._bound_of = bound_of or self._seconds_of
        if bound_of is None and seconds_of is None and model.method == "simulated":
            self._bound_of = lambda plan: model.slowest_pipeline_s(plan, least_s)
        self._any_order_bound_of = bound_of or (lambda plan: model.slowest_pipeline_s(plan, least_of_any_order_s))
        self._seeds: dict[Candidate, list[Plan]] = {}  # candidates whose order is sought only when they are estimated
        self._tell = tell or (lambda looked_at, best, sought: None)
        self._began = process_time()
        self._plans: dict[Candidate, Plan] = {}
        self._bounds: dict[Candidate, float] = {}
        self._seconds: dict[Candidate, float] = {}
        self._estimated: set[Plan] = set()
        self._best: list[float] = []  # seconds of the ``budget.best`` fastest plans, fastest first
        self._refusals = Refusals()
        self.looked_at = 0

    @property
    def spent(self) -> bool:
        """Whether the budget is used up."""
        return self.looked_at >= self.budget.candidates or self.elapsed_s > self.budget.seconds

    @property
    def elapsed_s(self) -> float:
        """Seconds of processor time so far; the clock would let other processes change results."""
        return process_time() - self._began

    @property
    def simulated(self) -> int:
        """Number of candidates that were estimated."""
        return len(self._seconds)

    @property
    def fastest_s(self) -> float:
        return self._best[0] if self._best else inf

    def bound(self, candidate: Candidate) -> float:
        """A lower bound of the estimate of ``candidate``; infinity if it has no Plan. Counts as one look at it."""
        self.looked_at += 1
        if candidate not in self._bounds:
            try:
                if is_sought(candidate):
                    self._seeds[candidate] = self.maker.seeds(candidate)
                    self._bounds[candidate] = min(map(self._any_order_bound_of, self._seeds[candidate]))
                else:
                    self.add(candidate, self.maker.plan(candidate))
            except InputError as error:  # for example layers that were not measured at this tensor-parallel degree
                self._refuse(candidate, error)
        return self._bounds[candidate]

    def plan(self, candidate: Candidate) -> Plan:
        """The Plan of ``candidate``, whose ``bound`` must have been finite; a synthesized one once it is estimated."""
        return self._plans[candidate]

    def add(self, candidate: Candidate, plan: Plan) -> None:
        """Add a Plan that was made elsewhere."""
        self._plans[candidate] = plan
        self._bounds[candidate] = self._bound_of(plan)

    def seconds(self, candidate: Candidate) -> float:
        """The estimate of ``candidate``, whose ``bound`` must have been finite; infinity if no order of it fits."""
        if candidate not in self._seconds and candidate not in self._plans:
            self._tell(self.looked_at, self.fastest_s, True)
            try:
                self._plans[candidate] = self.maker.with_best_order(candidate, self._seeds[candidate])
            except InputError as error:
                self._refuse(candidate, error)
                return inf
        if candidate not in self._seconds:
            plan = self._plans[candidate]
            self._seconds[candidate] = self._seconds_of(plan)
            if plan not in self._estimated:
                self._estimated.add(plan)
                insort(self._best, self._seconds[candidate])
                del self._best[self.budget.best :]
            self._tell(self.looked_at, self.fastest_s, False)
        return self._seconds[candidate]

    def ranked(self) -> list[Ranked]:
        """All estimated candidates, fastest first; of several candidates with the same Plan, the first."""
        found: dict[Plan, Ranked] = {}
        for candidate, seconds in self._seconds.items():
            plan = self._plans[candidate]
            found.setdefault(plan, Ranked(candidate=candidate, plan=plan, seconds=seconds))
        return sorted(found.values(), key=lambda one: one.seconds)

    def _refuse(self, candidate: Candidate, error: InputError) -> None:
        self._refusals.add(candidate, str(error), error.kind)
        self._bounds[candidate] = inf

    def limit(self) -> float:
        """The estimate that a plan must beat to be among the ``budget.best`` fastest."""
        return self._best[-1] if len(self._best) == self.budget.best else inf

    def refused(self) -> Refusals:
        """All impossible candidates that the search has come across."""
        return self.domain.refused + self._refusals
