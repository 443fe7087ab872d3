"""The Search that every algorithm works on: estimates of candidates within a budget, and their ranking."""

from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from time import process_time

from auto3d.cost.memory.device import in_gib
from auto3d.cost.model import CostModel
from auto3d.errors import InputError, ProblemKind
from auto3d.plan import Plan, PlanError
from auto3d.schedule.shape import listed, shape_of
from auto3d.search.axes import EQUAL, OF_PLANS, Candidate, degrees_of
from auto3d.search.bound import least_of_any_order_s, least_s
from auto3d.search.make import PlanMaker
from auto3d.search.placement import MEGATRON, Degrees, nodes_of, place
from auto3d.search.planner_options import PlannerOptions
from auto3d.search.promise import Promises
from auto3d.search.space import Domain, Refusals
from auto3d.search.synthesized import is_sought

_INTERRUPTED = "interruption"
_RULED_OUT_PER_LOOK = 100  # number of candidates that are ruled out at once in about the time of a look


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The budget of one search. Without ``seconds``, equal budgets give equal results on every machine."""

    candidates: int  # number of candidates whose Plans are made
    simulations: float = inf  # number of Plans that are simulated
    seconds: float = inf  # cap of the processor time
    best: int = 20  # number of best plans to return; a search that its budget does not end loses none of them


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A candidate with its Plan and the predicted seconds of an iteration."""

    candidate: Candidate
    plan: Plan
    seconds: float
    same: tuple[Candidate, ...] = ()
    """Other candidates with the same stages and operations, whose costs are the same on their links."""


@dataclass(frozen=True, kw_only=True)
class Left:
    """The candidates that a search did not look at, and a lower bound of their seconds."""

    candidates: int = 0
    least_s: float = inf


class Search:
    """Makes Plans of the candidates that an algorithm asks for, and estimates each once.

    ``seconds_of`` estimates a Plan (default: the maker's cost model) and is never below ``bound_of`` (default: a time
    that no simulation beats; if the cost model does not simulate, the estimate itself). ``tell`` is called with the
    progress: the number of candidates looked at, the best time so far, and whether an order is sought now. RaNNC and
    AMP read ``options``.
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
        options: PlannerOptions | None = None,
    ) -> None:
        self.domain, self.maker, self.budget = domain, maker, budget
        self.options = options or PlannerOptions()
        self.promises = Promises(maker)
        model: CostModel = maker.model
        self._simulates = seconds_of is None and model.method == "simulated"
        self._seconds_of = seconds_of or model.seconds
        self._bound_of = bound_of or self._seconds_of
        if bound_of is None and self._simulates:
            self._bound_of = lambda plan: model.slowest_pipeline_s(plan, least_s)
        self._any_order_bound_of = bound_of or (lambda plan: model.slowest_pipeline_s(plan, least_of_any_order_s))
        self._seeds: dict[Candidate, list[Plan]] = {}  # candidates whose order is sought only when they are estimated
        self._tell = tell or (lambda looked_at, best, sought: None)
        self._began = process_time()
        self._plans: dict[Candidate, Plan] = {}
        self._bounds: dict[Candidate, float] = {}
        self._seconds: dict[Candidate, float] = {}
        self._first: dict[tuple, Candidate] = {}  # ``_difference`` of a plan -> its first candidate
        self._same: dict[Candidate, list[Candidate]] = {}  # first candidate -> all that are the same plan
        self._best: list[float] = []  # seconds of the ``budget.best`` fastest plans, fastest first
        self._refusals = Refusals()
        self._reasons: dict[Candidate, tuple[str, ProblemKind]] = {}  # why candidates have no plan
        self._nodes = lru_cache(None)(self._make_nodes)
        self._numbers_of_nodes: dict[tuple[int, ...], int] = {}
        self._placed: dict[tuple[Candidate, int], Candidate] = {}  # candidate but for its placement, nodes -> the first
        self._seen: Counter[tuple] = Counter()  # degrees -> number of candidates that were looked at or ruled out
        self.lacking_memory: list[Candidate] = []
        self.looked_at = self.ruled_out = 0
        self.simulated = 0  # number of different plans that were estimated
        self.left = Left()
        self.ended_by = ""  # cause of an early end: a field of Budget, or _INTERRUPTED

    @property
    def spent(self) -> bool:
        """Whether the budget is used up; ``ended_by`` then says which part of it. The first look is always free."""
        if self.looked_at + self.ruled_out // _RULED_OUT_PER_LOOK >= self.budget.candidates:
            self.ended_by = "candidates"
        elif self.simulated >= self.budget.simulations:
            self.ended_by = "simulations"
        elif self.looked_at and self.elapsed_s > self.budget.seconds:
            self.ended_by = "seconds"
        return bool(self.ended_by)

    @property
    def interrupted(self) -> bool:
        return self.ended_by == _INTERRUPTED

    @property
    def elapsed_s(self) -> float:
        """Seconds of processor time so far; the clock would let other processes change results."""
        return process_time() - self._began

    @property
    def fastest_s(self) -> float:
        return self._best[0] if self._best else inf

    def interrupt(self) -> None:
        """Note that the algorithm was interrupted."""
        self.ended_by = _INTERRUPTED

    def unseen_of(self, degrees: Candidate) -> int:
        """The number of candidates with these degrees that have been neither looked at nor ruled out."""
        return self.domain.variants_of(degrees) - self._seen[degrees_of(degrees)]

    def has_seen(self, candidate: Candidate) -> bool:
        """Whether ``candidate`` has been looked at or ruled out."""
        return candidate in self._bounds

    def bound(self, candidate: Candidate) -> float:
        """A lower bound of the estimate of ``candidate``, or infinity if it has no Plan.

        The first call is a look, unless the candidate's depth or the promise of its memory rules it out at once.
        """
        if candidate not in self._bounds:
            self._seen[degrees_of(candidate)] += 1
            try:
                self._begin_look(candidate)
                if (alike := self._placed_alike(candidate)) is not None:
                    self._follow(candidate, alike)
                elif is_sought(candidate):
                    self._seeds[candidate] = self.maker.seeds(candidate)
                    self._bounds[candidate] = min(map(self._any_order_bound_of, self._seeds[candidate]))
                else:
                    self.add(candidate, self.maker.plan(candidate))
            except InputError as error:  # for example layers that were not measured at this tensor-parallel degree
                self._refuse(candidate, error)
            self._tell(self.looked_at, self.fastest_s, False)
        return self._bounds[candidate]

    def _begin_look(self, candidate: Candidate) -> None:
        """Count a look, or raise InputError if the depth or the promise of memory rules ``candidate`` out at once."""
        try:
            self.maker.check_depth(candidate)
            self._check_may_fit(candidate)
        except InputError:
            self.ruled_out += 1
            raise
        self.looked_at += 1

    def _placed_alike(self, candidate: Candidate) -> Candidate | None:
        """The first candidate that differs only in a placement with equal nodes, if that was looked at before."""
        if candidate.replicas != EQUAL or is_sought(candidate):
            return None
        nodes = self._nodes(candidate.placement, Degrees.of(candidate))
        first = self._placed.setdefault((replace(candidate, placement=MEGATRON), nodes), candidate)
        return None if first is candidate else first

    def _make_nodes(self, placement: str, degrees: Degrees) -> int:
        """A number for the nodes of a placement; raises PlanError if there is no such placement."""
        cluster = self.maker.model.cluster
        nodes = nodes_of(place(placement, cluster, degrees), cluster)
        return self._numbers_of_nodes.setdefault(nodes, len(self._numbers_of_nodes))

    def _follow(self, candidate: Candidate, first: Candidate) -> None:
        """Take for ``candidate`` what is known of ``first``, whose ranks have equal nodes."""
        if first not in self._plans:
            reason, kind = self._reasons[first]
            raise PlanError(reason, kind=kind)
        placement = place(candidate.placement, self.maker.model.cluster, Degrees.of(candidate))
        self._plans[candidate] = replace(self._plans[first], placement=placement)
        self._bounds[candidate] = self._bounds[first]

    def _check_may_fit(self, candidate: Candidate) -> None:
        """Raise PlanError if the model does not fit the memory of the devices, however its stages are cut."""
        memory = [node.accelerator.memory_bytes for node in self.maker.model.cluster.nodes]
        most, least = max(inf if size is None else size for size in memory), self.promises.least_bytes(candidate)
        if least > most:
            problem = (
                f"a device needs {in_gib(least)} GiB or more, however the stages are cut; it has {in_gib(most)} GiB"
            )
            raise PlanError(problem, kind="memory")

    def leave_unseen(self) -> None:
        """Note what was not looked at, and a lower bound of it, for an algorithm that draws its candidates."""
        left = [degrees for degrees in self.domain.degrees if self.unseen_of(degrees)]
        self.left = Left(
            candidates=len(self.domain) - len(self._bounds),
            least_s=min((self.promises.least_of_degrees_s(self.domain, degrees) for degrees in left), default=inf),
        )

    def plan(self, candidate: Candidate) -> Plan:
        """The Plan of ``candidate``, whose ``bound`` must have been finite; a synthesized Plan once it is estimated."""
        return self._plans[candidate]

    def add(self, candidate: Candidate, plan: Plan) -> None:
        """Add a Plan that was made elsewhere."""
        self._plans[candidate] = plan
        self._bounds[candidate] = self._bound_of(plan)

    def seconds(self, candidate: Candidate) -> float:
        """The estimate of ``candidate``, whose ``bound`` must have been finite; infinity if no order of it fits."""
        if candidate in self._seconds:
            return self._seconds[candidate]
        if candidate not in self._plans:
            self._tell(self.looked_at, self.fastest_s, True)
            try:
                self._plans[candidate] = self.maker.with_best_order(candidate, self._seeds[candidate])
            except InputError as error:
                self._refuse(candidate, error)
                return inf
        plan = self._plans[candidate]
        first = self._first.setdefault(self._difference(plan), candidate)
        self._same.setdefault(first, []).append(candidate)
        if first is candidate:
            self.simulated += 1
            self._seconds[candidate] = self._seconds_of(plan)
            insort(self._best, self._seconds[candidate])
            del self._best[self.budget.best :]
        else:
            self._seconds[candidate] = self._seconds[first]
        self._tell(self.looked_at, self.fastest_s, False)
        return self._seconds[candidate]

    def _difference(self, plan: Plan) -> tuple:
        """What tells ``plan`` from others: plans that are equal in it run the same operations at the same costs."""
        if not self._simulates:
            return (plan,)
        listing, skipped = shape_of(plan).first_periods()  # later periods repeat these
        first = listed(listing)
        operations = tuple(first.operations), first.recompute, first.parts, first.iterations, skipped
        choices = tuple(getattr(plan, name) for name in OF_PLANS if name != "schedule")  # its operations say more
        return *choices, plan.stages, operations, self.maker.model.pipelines(plan)

    def ranked(self) -> list[Ranked]:
        """The estimated plans, fastest first; of several candidates that are the same plan, the first."""
        ranked = [
            Ranked(candidate=first, plan=self._plans[first], seconds=self._seconds[first], same=tuple(every[1:]))
            for first, every in self._same.items()
        ]
        return sorted(ranked, key=lambda entry: entry.seconds)

    def _refuse(self, candidate: Candidate, error: InputError) -> None:
        self._refusals.add(candidate, str(error), error.kind)
        self._reasons[candidate] = str(error), error.kind
        self._bounds[candidate] = inf
        if error.kind == "memory":
            self.lacking_memory.append(candidate)

    def limit(self) -> float:
        """The estimate that a plan must beat to be among the ``budget.best`` fastest."""
        return self._best[-1] if len(self._best) == self.budget.best else inf

    def refused(self) -> Refusals:
        """All impossible candidates that the search has come across."""
        return self.domain.refused + self._refusals
