"""The search for an order of operations: seeded by given schedules, improved until the time that it may take is over."""

from collections.abc import Sequence
from dataclasses import dataclass

from auto3d.schedule.operation import Schedule
from auto3d.synthesis.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Synthesis:
    """The order that a search found for a Problem."""

    schedule: Schedule  # with its syncs and updates
    makespan: float  # as simulated, in the unit of the costs
    begun_from: str  # name of the schedule that it improves


def synthesize(problem: Problem, *, seconds: float, seeds: Sequence[Schedule] = (), seed: int = 0) -> Synthesis:
    """The shortest order found within ``seconds``, never longer than any of ``seeds`` that fits ``problem``.

    Seeds have the stages and the devices of ``problem``. Raises InputError if no order is found that fits the memory.
    """
    raise NotImplementedError
