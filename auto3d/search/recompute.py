"""What a Plan recomputes: nothing, everything, or everything but Merak's fraction of each stage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil

from auto3d.partition.recompute import first_fractions, keep_last, kept_fractions
from auto3d.plan import Plan, PlanError, StagePlan
from auto3d.schedule import SCHEDULES
from auto3d.schedule.options import SYNC
from auto3d.schedule.shape import shape, shape_of

NONE, FULL, AUTO = "none", "full", "auto"


def schedule_options(
    schedule: str,
    given: Mapping[str, int | str],
    recompute: str | float,
    sync: str,
    *,
    devices: int,
    micro_batches: int,
) -> dict[str, int | str]:
    """The options of ``schedule``: ``given``, the option that makes it recompute if it has to, and ``sync``.

    A ``sync`` in ``given`` has priority. Raises PlanError if the schedule does not recompute although it has to.
    """
    if "recompute" in given:
        raise PlanError(f"schedule_options: recompute is {given['recompute']!r}; set the key recompute instead")
    given = ({} if sync == SYNC[0] else {"sync": sync}) | dict(given)
    if recompute == NONE:
        return given
    if schedule in SCHEDULES and "recompute" in SCHEDULES[schedule].options:
        return {**given, "recompute": "full"}
    if not shape(schedule, devices=devices, micro_batches=micro_batches, options=given).recompute:
        raise PlanError(f"recompute: {recompute}; schedule {schedule} does not recompute: it takes none")
    return given


class KeptFractions:
    """Variants of ``plan``, whose schedule recomputes, that differ in the fraction that each stage keeps."""

    def __init__(self, plan: Plan, starts: Callable[[StagePlan], Sequence[int]]) -> None:
        """``starts`` returns the positions where the subgraphs of a stage begin."""
        form = shape_of(plan)
        self._plan = plan
        self._in_flight = form.in_flight
        self._starts = [starts(stage) if number in form.recompute else [] for number, stage in enumerate(plan.stages)]

    @property
    def first(self) -> list[float]:
        """Every fraction α₁ of the first stage at which some stage keeps more, ascending.

        Rounded to four decimals, since people read and write them; upwards, since numbers of subgraphs are rounded
        down.
        """
        exact = first_fractions(self._in_flight, [len(starts) for starts in self._starts])
        return sorted({ceil(round(fraction * 10**4, 6)) / 10**4 for fraction in exact})

    def plan(self, first: float) -> Plan:
        """The plan for α₁ = ``first``; if every stage keeps everything, without recomputation if that is an option."""
        fractions = kept_fractions(self._in_flight, first)
        stages = tuple(
            keep_last(stage, starts, fraction) if starts else stage
            for stage, starts, fraction in zip(self._plan.stages, self._starts, fractions, strict=True)
        )
        options = dict(self._plan.schedule_options)
        if "recompute" in options and all(stage.kept == stage.operations for stage in stages):
            del options["recompute"]
            return replace(self._plan, schedule_options=options)
        return replace(self._plan, stages=stages)


def largest_fraction(fractions: KeptFractions, shortage: Callable[[Plan], str]) -> Plan:
    """The plan of the largest α₁ that fits into memory; raises PlanError with the missing memory if none does."""
    for first in reversed(fractions.first):
        plan = fractions.plan(first)
        missing = shortage(plan)
        if not missing:
            return plan
    raise PlanError(f"{missing}, even with full recomputation", kind="memory")
