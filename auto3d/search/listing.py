"""Every combination of a search space as a Plan, or with the reason why there is none: the list that a sweep runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from auto3d.errors import InputError, ProblemKind
from auto3d.plan import EngineRefusalError, Plan, PlanError
from auto3d.schedule import build_schedule, parse_schedule
from auto3d.schedule.in_flight import peak_activations
from auto3d.schedule.operation import Schedule
from auto3d.search.axes import Candidate
from auto3d.search.make import PlanMaker
from auto3d.search.recompute import schedule_options
from auto3d.search.space import Domain


@dataclass(frozen=True, kw_only=True)
class ListedCandidate:
    """One candidate with its ``plan``, or with the ``reason`` why it cannot or need not run."""

    candidate: Candidate
    plan: Plan | None
    reason: str
    kind: ProblemKind = "other"  # kind of the reason
    refused: Plan | None = None  # the plan that the candidate's engine, a peer, cannot train


def list_candidates(domain: Domain, maker: PlanMaker) -> Iterator[ListedCandidate]:
    """All candidates in order. Of equal plans, or plans that do the same, only the first gets its plan.

    If the model cannot be captured at some numbers of samples (batch statistics need two), those candidates are
    refused. If it cannot be captured at any, the error is raised at the end.
    """
    made: dict[Plan, Candidate] = {}
    for candidate, reason in domain.everything():
        plan = refused = None
        kind: ProblemKind = "other"
        try:
            if reason:
                raise PlanError(reason)
            plan = maker.plan(candidate)
            _check_worth(plan, domain.choices["schedule"], candidate)
            if (same := made.setdefault(plan, candidate)) != candidate:
                raise PlanError(f"the same plan as with {_difference(candidate, same)}")
        except InputError as error:
            plan, reason, kind = None, str(error), error.kind
            refused = error.plan if isinstance(error, EngineRefusalError) else None
        yield ListedCandidate(candidate=candidate, plan=plan, reason=reason, kind=kind, refused=refused)
    maker.check_captured()


def _difference(candidate: Candidate, other: Candidate) -> str:
    names = [name for name in Candidate.__dataclass_fields__ if getattr(candidate, name) != getattr(other, name)]
    return ", ".join(f"{name} {getattr(other, name)}" for name in names)


def _check_worth(plan: Plan, schedules: Sequence[str], candidate: Candidate) -> None:
    """Raise PlanError if another of ``schedules`` is at least as good as the schedule of ``plan`` at its sizes."""
    built = dict(_built(schedules, candidate, plan.micro_batches))
    own, names = candidate.schedule, list(built)

    def work(name: str) -> tuple:
        return built[name].operations, built[name].recompute

    if own in built:
        same = [name for name in names[: names.index(own)] if work(name) == work(own)]
        if same:
            raise PlanError(f"the same operations as {same[0]}")
    if plan.pp == 1 and names:
        leanest = min(names, key=lambda name: max(peak_activations(built[name])))
        if own != leanest:
            raise PlanError(f"one device has no pipeline: as fast as {leanest}, which holds no more activations")


def _built(schedules: Sequence[str], candidate: Candidate, micro_batches: int) -> Iterator[tuple[str, Schedule]]:
    """(text, schedule) for each of ``schedules`` that exists at these sizes."""
    sizes = {"devices": candidate.pp, "micro_batches": micro_batches}
    for text in schedules:
        name, written = parse_schedule(text)
        try:
            options = schedule_options(name, written, candidate.recompute, candidate.sync, **sizes)
            yield text, build_schedule(name, **sizes, **options)
        except InputError:
            continue
