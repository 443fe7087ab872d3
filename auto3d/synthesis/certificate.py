"""Certificates: how far an order is from the best possible, and why no order can be shorter."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from auto3d.errors import InputError
from auto3d.synthesis.bound import lower_bound
from auto3d.synthesis.exact import optimum
from auto3d.synthesis.problem import Problem

TOLERANCE = 1e-8  # relative; makespans and bounds are sums of floats
OPERATIONS = 300  # micro-batches of all stages up to which the solver's bound exceeds the other one within seconds


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The makespan of an order and a proven lower bound of all orders of its problem, in the unit of the costs."""

    makespan: float
    lower_bound: float
    reason: str  # why no order is shorter

    @property
    def gap(self) -> float:
        """The fraction by which the order is at most longer than the best possible one."""
        if self.makespan <= self.lower_bound * (1 + TOLERANCE):
            return 0.0
        return self.makespan / self.lower_bound - 1 if self.lower_bound else inf

    def __str__(self) -> str:
        distance = f"within {self.gap:.2%} of the best possible" if self.gap else "the best possible"
        return f"{distance}: no order takes less than {self.lower_bound:.6g} ({self.reason})"


def certificate(problem: Problem, makespan: float, *, seconds: float) -> Certificate:
    """The distance of an order with this ``makespan`` from the best order of ``problem``.

    If the fast bounds leave a gap and the problem is small, an exact solver tries to close it for up to ``seconds``.
    Raises InputError if ``makespan`` is less than any order takes, or if none fits the memory.
    """
    bound = lower_bound(problem)
    best, reason = bound.time, bound.reason
    if best * (1 + TOLERANCE) < makespan and seconds > 0 and problem.stages * problem.micro_batches <= OPERATIONS:
        solved = optimum(problem, seconds=seconds)
        if solved.lower_bound > best:
            best = solved.lower_bound
            reason = "optimum of an exact solver" if solved.proven else f"an exact solver's bound after {seconds:g} s"
    if makespan < best * (1 - TOLERANCE):
        raise InputError(
            f"certificate: a makespan of {makespan:g} is less than the {best:g} that any order of the problem takes "
            f"({reason}); simulate the order at the problem's costs"
        )
    return Certificate(makespan=makespan, lower_bound=best, reason=reason)


def weakest(certificates: Iterable[Certificate]) -> Certificate:
    """The certificate of an order for which several problems were open, such as one per placement of its stages.

    The best order of all is that of one of them, so only the least of their lower bounds holds.
    """
    return min(certificates, key=lambda one: one.lower_bound)
