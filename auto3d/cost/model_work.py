"""The work of one model at any micro-batch size and any share of it, as estimates of time and memory use it."""

from functools import lru_cache

from auto3d.cost.tables import WorkTables, without
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import Work, WorkAt
from auto3d.plan import Plan, StagePlan
from auto3d.share import WHOLE, Share, share_of


class ModelWork:
    """Tables of a model's work; ``work_at`` makes the Work of a share of a number of samples."""

    def __init__(self, work_at: WorkAt, training: TrainingOptions) -> None:
        self._work_at = lru_cache(None)(work_at)
        self._training = training
        self._tables = lru_cache(None)(lambda *key: WorkTables(self._work_at(*key)))

    def work_at(self, samples: int, share: Share = WHOLE) -> Work:
        return self._work_at(samples, share)

    def tables(self, samples: int, share: Share = WHOLE) -> WorkTables:
        return self._tables(samples, share)

    def slice_of(self, samples: int, parts: int) -> tuple[int, int]:
        """(samples to look up, divisor of the result) for one of ``parts`` equal slices of ``samples``.

        A model can have other operations at the size of the slice, above all at a single sample, and then positions
        mean other operations there. In that case the slice costs an equal fraction of the whole.
        """
        slice_samples = samples // parts
        same = parts == 1 or len(self.work_at(slice_samples)) == len(self.work_at(samples))
        return (slice_samples, 1) if same else (samples, parts)

    def kept(self, samples: int, stage: StagePlan) -> tuple[tuple[int, int], ...]:
        """Ranges of the operations of ``stage`` that are not recomputed where the stage recomputes."""
        if self._training.recompute_ends or stage.kept:
            return stage.kept
        begin, end = self.recomputed(samples)
        return tuple(
            (max(first, start), min(last, stop))
            for first, last in stage.operations
            for start, stop in ((0, begin), (end, len(self.work_at(samples))))
            if max(first, start) < min(last, stop)
        )

    def dropped(self, samples: int, stage: StagePlan, *, recompute: bool) -> tuple[tuple[int, int], ...]:
        """Ranges of the operations that ``stage`` runs again, if it recomputes."""
        return without(stage.operations, self.kept(samples, stage)) if recompute else ()

    def recomputed(self, samples: int) -> tuple[int, int]:
        """Full recomputation runs the operations from the first to before the second position again."""
        work = self.work_at(samples)
        return (0, len(work)) if self._training.recompute_ends else work.repeated

    def tables_of(self, plan: Plan) -> WorkTables:
        """The tables of ``plan`` at its whole micro-batch."""
        return self.tables(plan.micro_batch_size, share_of(plan))

    def elements(self, plan: Plan, operations: tuple[tuple[int, int], ...]) -> float:
        """The number of parameters that a rank with ``operations`` trains; a tied parameter counts once."""
        return self.tables_of(plan).parameters(operations)
