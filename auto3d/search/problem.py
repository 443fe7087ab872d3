"""The problem of a partition method in a search: the stages of a candidate, at the costs of the cost model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from auto3d.cost.model import CostModel, PipelineTimes
from auto3d.partition.outline import Outline
from auto3d.plan import Plan, StagePlan
from auto3d.schedule.shape import Shape
from auto3d.search.planned_model import PlannedModel

Keep = Callable[[int, StagePlan, Sequence[int]], StagePlan]
"""(number of a stage, the stage, positions where its subgraphs begin) -> the stage with what it keeps."""


@dataclass(frozen=True, kw_only=True)
class CandidateProblem:
    """How to cut the model ``planned`` for ``plan``, a draft whose stages are any.

    ``limits`` has the bytes that each pipeline device may fill, infinite where unknown; None: all of them infinite.
    ``excluded`` has runs (stage, first position, last position) that are too large for a device together with its other
    stages. ``keep`` adds what a stage keeps where it recomputes the rest.
    """

    planned: PlannedModel
    model: CostModel
    plan: Plan
    shape: Shape
    samples: int
    limits: Sequence[float] | None = None
    excluded: Sequence[tuple[int, int, int]] = ()
    keep: Keep = lambda number, stage, starts: stage

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
        return self.model.pipeline_times(self.plan, self.cuts)

    @property
    def before(self) -> tuple[float, ...]:
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
        return tuple(self._earliest(number, self.limits) for number in range(self.stages))

    def _earliest(self, number: int, limits: Sequence[float]) -> tuple[int, ...]:
        """For each cut, the first cut at which stage ``number`` may begin if it ends there.

        A stage that does not fit does not fit with more operations either, so a window moves over the cuts.
        """
        excluded = [(first, last) for stage, first, last in self.excluded if stage == number]
        starts, start = [0], 0
        for end in range(1, len(self.cuts)):
            while start < end and not self._fits(number, start, end, limits, excluded):
                start += 1
            starts.append(start)
        return tuple(starts)

    def _fits(
        self, number: int, start: int, end: int, limits: Sequence[float], excluded: Sequence[tuple[int, int]]
    ) -> bool:
        first, last = self.cuts[start], self.cuts[end]
        if any(first <= inner and outer <= last for inner, outer in excluded):
            return False
        stage = self.keep(number, StagePlan(operations=((first, last),)), self.cuts[start:end])
        needed = self.model.stage_memory(self.plan, number, stage)
        return all(size <= limits[device] for device, size in needed.items())
