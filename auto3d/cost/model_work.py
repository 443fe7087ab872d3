"""The work of one model at any micro-batch size, as the estimates of time and of memory look it up."""

from collections.abc import Callable
from functools import lru_cache

from auto3d.cost.tables import WorkTables
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import Work
from auto3d.plan import Plan, StagePlan


class ModelWork:
    """Tables of a model's work by number of samples; ``work_at`` makes the Work of a number of samples."""

    def __init__(self, work_at: Callable[[int], Work], training: TrainingOptions) -> None:
        self.work_at = lru_cache(None)(work_at)
        self._training = training
        self._tables = lru_cache(None)(lambda samples: WorkTables(self.work_at(samples)))

    def tables(self, samples: int) -> WorkTables:
        return self._tables(samples)

    def slice_of(self, samples: int, replicas: int) -> tuple[int, int]:
        """(samples to look up, divisor of the result) for one of ``replicas`` stage replicas' slice of ``samples``.

        A model can have other operations at the size of the slice, above all at a single sample, and then positions
        mean other operations there. In that case the slice costs an equal fraction of the whole.
        """
        each = samples // replicas
        same = replicas == 1 or len(self.work_at(each)) == len(self.work_at(samples))
        return (each, 1) if same else (samples, replicas)

    def kept(self, samples: int, stage: StagePlan) -> tuple[tuple[int, int], ...]:
        """Ranges of the operations of ``stage`` that are not recomputed where the stage recomputes."""
        if self._training.recompute_ends or stage.kept:
            return stage.kept
        tables = self.tables(samples)
        begin, end = tables.blocks
        return tuple(
            (max(first, start), min(last, stop))
            for first, last in stage.operations
            for start, stop in ((0, begin), (end, len(tables.work)))
            if max(first, start) < min(last, stop)
        )

    def elements(self, plan: Plan, operations: tuple[tuple[int, int], ...]) -> float:
        """The number of parameters that a rank with ``operations`` trains; a tied parameter counts once."""
        return self.tables(plan.micro_batch_size).parameters(operations, plan.tp)
