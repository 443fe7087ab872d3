"""The largest fraction of a plan that need not be recomputed, under the memory of its devices (Merak)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, inf

import numpy as np

from auto3d.cluster import Cluster
from auto3d.cost.memory.plan import PlanMemory
from auto3d.partition.recompute import first_fractions, keep_last, kept_count, kept_fractions
from auto3d.plan import Plan, PlanError, StagePlan
from auto3d.schedule.moments import stages_of
from auto3d.schedule.shape import shape_of


class KeptFractions:
    """Variants of ``plan``, whose schedule recomputes, that differ in the fraction that each stage keeps."""

    def __init__(self, plan: Plan, starts: Callable[[StagePlan], Sequence[int]]) -> None:
        """``starts`` returns the positions where the subgraphs of a stage begin."""
        form = shape_of(plan)
        self._plan = plan
        self._in_flight = form.in_flight
        self._starts = [starts(stage) if number in form.recompute else [] for number, stage in enumerate(plan.stages)]

    @cached_property
    def first(self) -> list[float]:
        """Every fraction α₁ of the first stage at which some stage keeps more, ascending.

        Rounded to four decimals, since people read and write them; upwards, since numbers of subgraphs are rounded
        down.
        """
        return list(_rounded_first(self._in_flight, tuple(map(len, self._starts))))

    def plan(self, first: float) -> Plan:
        """The plan for α₁ = ``first``; if every stage keeps everything, without recomputation if that is an option."""
        return self.plan_of(kept_fractions(self._in_flight, first))

    def plan_of(self, fractions: Sequence[float]) -> Plan:
        """The plan whose stages keep these ``fractions`` of their subgraphs, as far as they recompute."""
        stages = tuple(
            keep_last(stage, starts, fraction) if starts else stage
            for stage, starts, fraction in zip(self._plan.stages, self._starts, fractions, strict=True)
        )
        options = dict(self._plan.schedule_options)
        if "recompute" in options and all(stage.kept == stage.operations for stage in stages):
            del options["recompute"]
            return replace(self._plan, schedule_options=options)
        return replace(self._plan, stages=stages)

    def of(self, plan: Plan) -> list[float]:
        """The fraction of its subgraphs that each stage of ``plan``, a variant, does not recompute."""
        recompute = shape_of(plan).recompute
        return [
            sum(any(first <= start < last for first, last in stage.kept) for start in starts) / len(starts)
            if number in recompute and starts
            else 1.0
            for number, (stage, starts) in enumerate(zip(plan.stages, self._starts, strict=True))
        ]

    @cached_property
    def kept_from(self) -> np.ndarray:
        """[fractions of ``first``, stages]: the position from which each stage keeps its operations until its end."""
        counts = _kept_counts(self._in_flight, tuple(map(len, self._starts)))
        kept_from = np.empty(counts.shape, dtype=int)
        for number, (stage, starts) in enumerate(zip(self._plan.stages, self._starts, strict=True)):
            begin, end = stage.operations[0][0], stage.operations[-1][1]
            positions = np.array([end, *starts[:0:-1], begin])  # positions for 0, 1, 2, … kept subgraphs
            kept_from[:, number] = positions[counts[:, number]]
        return kept_from


@lru_cache(1024)  # many plans of a search have the same stages
def _rounded_first(in_flight: tuple[int, ...], subgraphs: tuple[int, ...]) -> tuple[float, ...]:
    exact = first_fractions(in_flight, subgraphs)
    return tuple(sorted({ceil(round(fraction * 10**4, 6)) / 10**4 for fraction in exact}))


@lru_cache(256)
def _kept_counts(in_flight: tuple[int, ...], subgraphs: tuple[int, ...]) -> np.ndarray:
    """[fractions, stages]: the subgraphs that each stage keeps at each α₁ of ``_rounded_first``."""
    rows = (kept_fractions(in_flight, first) for first in _rounded_first(in_flight, subgraphs))
    return np.array([list(map(kept_count, subgraphs, fractions)) for fractions in rows])


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The memory of the devices of ``cluster``, and what plans need of it."""

    memory: PlanMemory
    cluster: Cluster

    def of(self, plan: Plan, device: int) -> float:
        """The bytes that ``device`` has; infinite where they are unknown."""
        return self.cluster.memory_of(plan.meshes[device].ranks) or inf

    def lacking(self, plan: Plan, before: Sequence[int] = ()) -> int | None:
        """A pipeline device that lacks memory for ``plan``, if any does; the devices in ``before`` are asked first."""
        for device in before:
            if self.memory.of_device(plan, device) > self.of(plan, device):
                return device
        needed = enumerate(self.memory.one_by_one(plan))
        return next((device for device, size in needed if size > self.of(plan, device)), None)


def largest_fraction(fractions: KeptFractions, shortage: Callable[[Plan], str], limits: Limits | None = None) -> Plan:
    """The plan of the largest α₁ that fits into memory; raises PlanError with the missing memory if none does.

    ``shortage`` says what a plan lacks. With ``limits``, which must agree with it, few plans are asked: a stage that
    keeps more does not always need more, but a device that lacks memory rules out all fractions at which it keeps the
    same, and all at which a lower bound of its bytes is too large.
    """
    if limits is not None:
        largest = _largest_within(fractions, limits)
        if largest is not None:
            return largest
        missing = shortage(fractions.plan(fractions.first[0]))
    else:
        for first in reversed(fractions.first):
            plan = fractions.plan(first)
            if not (missing := shortage(plan)):
                return plan
    raise PlanError(f"{missing}, even with full recomputation", kind="memory")


def _largest_within(fractions: KeptFractions, limits: Limits) -> Plan | None:
    kept_from = fractions.kept_from
    possible = np.ones(len(kept_from), dtype=bool)
    lacked: dict[int, None] = {}  # devices that lacked memory for a plan, the latest first
    while possible.any():
        place = int(np.flatnonzero(possible)[-1])
        plan = fractions.plan(fractions.first[place])
        device = limits.lacking(plan, tuple(lacked))
        if device is None:
            return plan
        possible[place] = False
        form = shape_of(plan)
        if not form.recompute:  # the one plan that keeps everything
            continue
        stages = stages_of(form, device)
        possible &= (kept_from[:, stages] != kept_from[place, stages]).any(axis=1)
        if device not in lacked:
            least = limits.memory.at_least(plan, device, {number: kept_from[:, number] for number in stages})
            if least is not None:
                possible &= least <= limits.of(plan, device)
        lacked = {device: None} | lacked
    return None
