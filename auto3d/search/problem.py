"""The problem of a partition method in a search: the stages of a candidate, at the costs of the cost model."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from auto3d.cost.model import CostModel, Kept, PipelineTimes
from auto3d.partition.outline import Outline
from auto3d.partition.recompute import keep_last
from auto3d.plan import Plan, StagePlan
from auto3d.schedule.shape import Shape
from auto3d.search.planned_model import PlannedModel


@dataclass(frozen=True, kw_only=True)
class CandidateProblem:
    """How to cut the model ``planned`` for ``plan``, a draft whose stages are any.

    ``limits`` has the bytes that each pipeline device may fill, infinite where unknown; None: all of them infinite.
    ``excluded`` has runs (stage, first position, last position) that are too large for a device together with its other
    stages. ``kept`` is as in ``CostModel.pipeline_times``.
    """

    planned: PlannedModel
    model: CostModel
    plan: Plan
    shape: Shape
    samples: int
    limits: Sequence[float] | None = None
    excluded: Sequence[tuple[int, int, int]] = ()
    kept: Kept = ()

    @property
    def stages(self) -> int:
        return self.shape.stages

    @property
    def micro_batches(self) -> int:
        return self.shape.micro_batches

    @property
    def outline(self) -> Outline:
        return self.planned.outline(self.samples)

    @property
    def cuts(self) -> Sequence[int]:
        return self.planned.cuts(self.samples)

    @cached_property
    def _pipeline(self) -> PipelineTimes:
        return self.model.pipeline_times(self.plan, self.cuts, kept=self.kept)

    @property
    def before(self) -> tuple[tuple[float, ...], ...]:
        return self._pipeline.before

    @property
    def messages(self) -> tuple[float, ...]:
        return self._pipeline.messages

    @property
    def speeds(self) -> tuple[float, ...]:
        return self._pipeline.speeds

    @property
    def memory_bytes(self) -> float:
        return self.model.cluster.memory_bytes or float("inf")

    @cached_property
    def earliest(self) -> tuple[tuple[int, ...], ...] | None:
        if self.limits is None:
            return None
        lowest = [len(self.cuts) - 1]  # the first cut from which the last stages reach the end: none of them, one, …
        for number in reversed(range(self.stages)):
            lowest.append(self._first_start(number, lowest[-1], self.limits))
        earliest, highest = [], 0
        for number in range(self.stages):
            starts, highest = self._starts(
                number, (lowest[self.stages - number], highest), lowest[self.stages - number - 1], self.limits
            )
            earliest.append(starts)
        return tuple(earliest)

    def _first_start(self, number: int, end: int, limits: Sequence[float]) -> int:
        """The first cut at which stage ``number`` may begin if it ends at cut ``end``."""
        return bisect_left(range(end), True, key=lambda start: self._fits(number, start, end, limits))

    def _starts(
        self, number: int, between: tuple[int, int], end: int, limits: Sequence[float]
    ) -> tuple[tuple[int, ...], int]:
        """For each cut, the first cut at which stage ``number`` may begin if it ends there; and the last of its ends.

        Only stages that begin ``between`` two cuts and end at cut ``end`` or later can be part of a partition: before
        ``end``, the rest of the model does not fit the later stages. There the first cut is 0; where the stage begins
        too late, it is a cut behind all cuts. A stage that does not fit does not fit with more operations either, so a
        window moves over the cuts.
        """
        (start, latest), size = between, len(self.cuts)
        starts = [0] * end
        for last in range(end, size):
            while start < last and not self._fits(number, start, last, limits):
                start += 1
            if start > latest:
                break
            starts.append(start)
        return (*starts, *[size] * (size - len(starts))), len(starts) - 1

    def _fits(self, number: int, start: int, end: int, limits: Sequence[float]) -> bool:
        first, last = self.cuts[start], self.cuts[end]
        if any(stage == number and first <= inner and outer <= last for stage, inner, outer in self.excluded):
            return False
        stage = StagePlan(operations=((first, last),))
        if self.kept and (fraction := self.kept[number]) is not None:
            stage = keep_last(stage, self.cuts[start:end], fraction)
        needed = self.model.memory.of_stage(self.plan, number, stage)
        return all(size <= limits[device] for device, size in needed.items())
