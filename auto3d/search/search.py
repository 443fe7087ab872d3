"""What every search algorithm works with: estimates of candidates within a budget, and what came of them."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from time import process_time

from auto3d.cost.model import CostModel
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.search.bound import least_s
from auto3d.search.make import PlanMaker
from auto3d.search.space import Candidate, Domain, Refusals


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Of one search. ``seconds`` of processor time end it wherever it is; without them a seed always gives the same."""

    candidates: int  # to look at
    seconds: float = inf
    best: int = 10  # how many of the best are asked for: what an exhaustive search must not lose


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A candidate with its Plan and the seconds that an iteration of it is predicted to take."""

    candidate: Candidate
    plan: Plan
    seconds: float


class Search:
    """Candidates of ``domain`` as the algorithms ask for them: each is made a Plan and estimated once.

    ``seconds_of`` estimates a Plan (default: the maker's cost model) and is never below ``bound_of`` (default: the time
    that a simulation cannot beat, or where nothing is simulated the estimate itself). ``tell`` hears of progress: how
    many candidates were looked at, and the best time so far.
    """

    def __init__(
        self,
        domain: Domain,
        maker: PlanMaker,
        budget: Budget,
        *,
        seconds_of: Callable[[Plan], float] | None = None,
        bound_of: Callable[[Plan], float] | None = None,
        tell: Callable[[int, float], None] | None = None,
    ) -> None:
        self.domain, self.maker, self.budget = domain, maker, budget
        model: CostModel = maker.model
        self._seconds_of = seconds_of or lru_cache(None)(model.seconds)
        self._bound_of = bound_of or self._seconds_of
        if bound_of is None and seconds_of is None and model.method == "simulated":
            self._bound_of = lambda plan: model.slowest_pipeline_s(plan, least_s)
        self._tell = tell or (lambda looked_at, best: None)
        self._began = process_time()
        self._plans: dict[Candidate, Plan] = {}
        self._bounds: dict[Candidate, float] = {}
        self._seconds: dict[Candidate, float] = {}
        self._estimated: set[Plan] = set()
        self._best: list[float] = []  # seconds of different plans, as many as are asked for, fastest first
        self._refusals = Refusals()
        self.looked_at = 0

    @property
    def spent(self) -> bool:
        """Whether the budget is."""
        return self.looked_at >= self.budget.candidates or self.elapsed_s > self.budget.seconds

    @property
    def elapsed_s(self) -> float:
        """Of processor time, so that what else the machine does changes no result."""
        return process_time() - self._began

    @property
    def simulated(self) -> int:
        """Candidates whose seconds were asked for."""
        return len(self._seconds)

    @property
    def fastest_s(self) -> float:
        return self._best[0] if self._best else inf

    def bound(self, candidate: Candidate) -> float:
        """Seconds that its estimate cannot beat; infinity where it makes no Plan. Counts as a look at it."""
        self.looked_at += 1
        if candidate not in self._bounds:
            try:
                plan = self.maker.plan(candidate)
            except InputError as error:
                self._refusals.add(candidate, str(error))
                self._bounds[candidate] = inf
            else:
                self.add(candidate, plan)
        return self._bounds[candidate]

    def add(self, candidate: Candidate, plan: Plan) -> None:
        """Take in a Plan that was made elsewhere."""
        self._plans[candidate] = plan
        self._bounds[candidate] = self._bound_of(plan)

    def seconds(self, candidate: Candidate) -> float:
        """Its estimate; ``bound`` must have been finite."""
        if candidate not in self._seconds:
            plan = self._plans[candidate]
            self._seconds[candidate] = self._seconds_of(plan)
            if plan not in self._estimated:
                self._estimated.add(plan)
                insort(self._best, self._seconds[candidate])
                del self._best[self.budget.best :]
            self._tell(self.looked_at, self.fastest_s)
        return self._seconds[candidate]

    def ranked(self) -> list[Ranked]:
        """All that were estimated, fastest first; of those that are the same Plan, one."""
        found: dict[Plan, Ranked] = {}
        for candidate, seconds in self._seconds.items():
            plan = self._plans[candidate]
            found.setdefault(plan, Ranked(candidate=candidate, plan=plan, seconds=seconds))
        return sorted(found.values(), key=lambda one: one.seconds)

    def limit(self) -> float:
        """The estimate that one must beat to be among the best that are asked for."""
        return self._best[-1] if len(self._best) == self.budget.best else inf

    def refused(self) -> Refusals:
        """All that cannot be, as far as the search came across them."""
        return self.domain.refused + self._refusals
