"""What a Plan recomputes: nothing, everything, or all but Merak's share of each stage, as large as memory allows."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil

from auto3d.capture.graph import Graph
from auto3d.partition.merak import shard
from auto3d.partition.recompute import first_shares, keep_last, kept_shares, subgraph_starts
from auto3d.plan import Plan, PlanError
from auto3d.schedule import SCHEDULES, build_schedule, schedule_of
from auto3d.schedule.memory import in_flight

NONE, FULL, AUTO = "none", "full", "auto"


def schedule_options(
    schedule: str, given: Mapping[str, int | str], recompute: str | float, *, devices: int, micro_batches: int
) -> dict[str, int | str]:
    """``given`` and what makes ``schedule`` recompute, unless ``recompute`` is none or the schedule always does.

    Raises PlanError where it cannot.
    """
    if "recompute" in given:
        raise PlanError(f"schedule_options: recompute is {given['recompute']!r}; it is said by recompute, not here")
    given = dict(given)
    if recompute == NONE:
        return given
    if schedule in SCHEDULES and "recompute" in SCHEDULES[schedule].options:
        return {**given, "recompute": "full"}
    if not build_schedule(schedule, devices=devices, micro_batches=micro_batches, **given).recompute:
        raise PlanError(f"recompute: {recompute}; schedule {schedule} does not recompute: it takes none")
    return given


class Shares:
    """The plans that differ from ``plan``, whose schedule recomputes, in what its stages keep."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        schedule = schedule_of(plan)
        bounds = shard(graph).bounds
        self._plan = plan
        self._in_flight = in_flight(schedule)
        self._starts = [
            subgraph_starts(graph, stage, bounds) if number in schedule.recompute else []
            for number, stage in enumerate(plan.stages)
        ]

    @property
    def first(self) -> list[float]:
        """Every share α₁ of the first stage at which some stage keeps more, ascending.

        Rounded up in the fourth decimal, since a share's subgraphs are rounded down: people read them, and write them.
        """
        exact = first_shares(self._in_flight, [len(starts) for starts in self._starts])
        return sorted({ceil(round(share * 10**4, 6)) / 10**4 for share in exact})

    def plan(self, first: float) -> Plan:
        """The plan of α₁ = ``first``; where every stage keeps all, without recomputation if that is an option."""
        shares = kept_shares(self._in_flight, first)
        stages = tuple(
            keep_last(stage, starts, share) if starts else stage
            for stage, starts, share in zip(self._plan.stages, self._starts, shares, strict=True)
        )
        options = dict(self._plan.schedule_options)
        if "recompute" in options and all(stage.kept == stage.operations for stage in stages):
            del options["recompute"]
            return replace(self._plan, schedule_options=options)
        return replace(self._plan, stages=stages)


def largest_share(shares: Shares, shortage: Callable[[Plan], str]) -> Plan:
    """The plan of the largest α₁ that is not short of memory; raises PlanError with what is missing where none is."""
    for first in reversed(shares.first):
        plan = shares.plan(first)
        missing = shortage(plan)
        if not missing:
            return plan
    raise PlanError(f"{missing}, even where as much is recomputed as can be")
