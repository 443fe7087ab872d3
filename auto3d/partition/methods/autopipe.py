"""Autopipe: contiguous stages balanced by time within the memory of the devices.

The time of a stage is its forward, its backward and what it recomputes. Autopipe has the aim of AutoPipe, which Merak
follows (Merak 2023, section 4.2), and reaches it exactly: no contiguous partition that fits has a faster slowest stage
and no division that is as fast sends less. This holds for the seconds in the problem, in which a stage that keeps
the fraction α recomputes 1 - α of its forward's seconds; the whole subgraphs that it really recomputes may take more.
It does not say that no pipeline is faster, so a search compares the plan with its rivals (``PlanMaker``). AutoPipe's
planner, which simulates the pipeline, is ``autopipe_planner``.
"""

from functools import lru_cache

from auto3d.partition.contiguous import balanced_cuts
from auto3d.partition.problem import StageProblem
from auto3d.partition.stage import PartitionError, check_enough
from auto3d.plan import StagePlan, stages_between

_balanced_cuts = lru_cache(4096)(balanced_cuts)  # a search asks for the same stages under many schedules


def choose_stages(problem: StageProblem) -> tuple[StagePlan, ...]:
    """The stages whose slowest is as fast as the memory of the devices allows, cut at some of ``problem.cuts``.

    Raises PartitionError where there are too few operations, or where no partition fits the memory of the devices.
    """
    check_enough(problem.before[0], problem.stages)
    bounds = _balanced_cuts(problem.before, problem.messages, problem.earliest)
    if bounds is None:
        raise PartitionError(
            f"{problem.stages} stages do not fit devices of {problem.memory_bytes / 2**30:.1f} GiB; "
            "more stages, smaller micro-batches or recomputation would need less",
            kind="memory",
        )
    return stages_between([problem.cuts[bound] for bound in bounds])
