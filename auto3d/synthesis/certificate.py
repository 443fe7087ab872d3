"""Certificates: how far an order is from the best possible, and why no order can be shorter."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf

from auto3d.errors import InputError
from auto3d.schedule.operation import Kind, Schedule
from auto3d.synthesis.apart import optimum_apart
from auto3d.synthesis.bound import Bound, lower_bound
from auto3d.synthesis.problem import Problem, peaks

TOLERANCE = 1e-8  # relative; makespans and bounds are sums of floats
OPERATIONS = 300  # micro-batches of all stages up to which the solver's bound exceeds the fast bound within seconds
SOLVER_SECONDS = 4.0  # time of the exact solver that commands give it


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The makespan of an order and a proven lower bound of all orders of its problem, in the unit of the costs."""

    makespan: float
    lower_bound: float
    reason: str  # why no order is shorter
    departure: str = ""  # how the order differs from all orders of its problem; empty if it is among them

    @property
    def gap(self) -> float:
        """The fraction by which the order is at most longer than the best possible order; below 0 after a departure."""
        if abs(self.makespan - self.lower_bound) <= TOLERANCE * self.lower_bound:
            return 0.0
        return self.makespan / self.lower_bound - 1 if self.lower_bound else inf

    def __str__(self) -> str:
        bound = f"{self.lower_bound:.6g} ({self.reason})"
        if self.gap < 0:
            shorter = f"{-self.gap:.2%} shorter than any order of the kind that is sought, because {self.departure}"
            return f"{shorter}; no order of that kind takes less than {bound}"
        distance = f"within {self.gap:.2%} of the best possible" if self.gap else "the best possible"
        return f"{distance}: no order takes less than {bound}"


def certificate(problems: Sequence[Problem], schedule: Schedule, makespan: float, *, seconds: float) -> Certificate:
    """The distance of ``schedule`` from the best order of any of ``problems``, such as one per placement of its stages.

    ``schedule`` takes ``makespan`` in the first of them that has its stages and devices. If the fast bounds leave a gap
    and the problems are small, an exact solver tries to close it for up to ``seconds``. Raises InputError if
    ``makespan`` is less than any order takes though ``schedule`` is an order, or if no order fits the memory.
    """
    bounds = [_bound(problem) for problem in problems]
    below = [number for number, bound in enumerate(bounds) if bound.time * (1 + TOLERANCE) < makespan]
    if seconds > 0 and all(problems[n].stages * problems[n].micro_batches <= OPERATIONS for n in below):
        for number in below:
            bounds[number] = _solved(problems[number], bounds[number], seconds / len(below))
    weakest = min(bounds, key=lambda bound: bound.time)
    if weakest.time == inf:
        raise InputError(weakest.reason)
    own = next(problem for problem in problems if problem.device_of == schedule.device_of)
    departs = departure(own, schedule)
    if makespan < weakest.time * (1 - TOLERANCE) and not departs:
        raise InputError(
            f"certificate: a makespan of {makespan:g} is less than the {weakest.time:g} that any order of the problem "
            f"takes ({weakest.reason}); simulate the order at the problem's costs"
        )
    return Certificate(makespan=makespan, lower_bound=weakest.time, reason=weakest.reason, departure=departs)


def departure(problem: Problem, schedule: Schedule) -> str:
    """How ``schedule`` differs from all orders of ``problem``, as a clause; empty if it is among them."""
    splits: set[int] = set()
    joined: set[int] = set()
    forwards = dict.fromkeys(problem.device_of, 0)
    for operation in chain.from_iterable(schedule.operations):
        if len(operation.micro_batches) > 1 or schedule.parts > 1:
            return "its operations run several micro-batches or parts of one"
        if operation.kind is Kind.FORWARD:
            forwards[operation.stage, operation.pipe] += 1
        elif operation.kind is Kind.BACKWARD:
            joined.add(operation.stage)
        elif operation.kind is Kind.BACKWARD_INPUT:
            splits.add(operation.stage)
    if mixed := splits & joined:
        return f"stage {min(mixed)} splits only some of its backwards"
    if not splits <= problem.may_split:
        return f"stage {min(splits - problem.may_split)} splits its backward"
    if not schedule.recompute <= problem.may_recompute:
        return f"stage {min(schedule.recompute - problem.may_recompute)} recomputes"
    if any(count != problem.per_pipe[pipe] for (_, pipe), count in forwards.items()):
        return "its pipes run other numbers of micro-batches"
    for device, (held, free) in enumerate(zip(peaks(problem, schedule), problem.free, strict=True)):
        if held > free * (1 + TOLERANCE):
            return f"its activations, at their largest, exceed the memory of device {device}"
    return ""


def _bound(problem: Problem) -> Bound:
    """The fast lower bound; infinite if no order fits the memory."""
    try:
        return lower_bound(problem)
    except InputError as error:
        return Bound(time=inf, reason=str(error))


def _solved(problem: Problem, fast: Bound, seconds: float) -> Bound:
    """The better of ``fast`` and the bound of an exact solver after ``seconds``."""
    try:
        solved = optimum_apart(problem, seconds=seconds)
    except InputError as error:
        return Bound(time=inf, reason=str(error))
    if solved is None or solved.lower_bound <= fast.time:
        return fast
    reason = "optimum of an exact solver" if solved.proven else f"an exact solver's bound after {seconds:.3g} s"
    return Bound(time=solved.lower_bound, reason=reason)
