"""A Plan's bytes per pipeline device from sums over tables: fast enough for the thousands of Plans of a search.

``auto3d.cost.device_memory`` counts the same bytes tensor by tensor from the Graph, in float32 and without tensor
parallelism. The sums here also cover other precisions, tensor parallelism and models that are known by their layers.
"""

from functools import lru_cache

from auto3d.cost.model_work import ModelWork
from auto3d.cost.stage_bytes import StageBytes, message_bytes
from auto3d.cost.tables import without
from auto3d.cost.training_options import MOMENTS, TrainingOptions
from auto3d.cost.work import PRECISION_BYTES
from auto3d.plan import Plan, StagePlan
from auto3d.schedule.shape import shape_of

FRAGMENTATION = 1.06  # bytes that an allocator holds, over the bytes in use


class PlanMemory:
    """Estimates the memory of Plans of one model."""

    def __init__(self, work: ModelWork, training: TrainingOptions) -> None:
        self._work, self._training = work, training
        self._stage_bytes = lru_cache(2**16)(self._make_stage_bytes)  # the plans of a search have many stages in common

    def of(self, plan: Plan) -> tuple[float, ...]:
        """Peak bytes on each pipeline device, fragmentation included."""
        shape = shape_of(plan)
        weight = PRECISION_BYTES[self._training.precision]
        optimizer = self._training.master_bytes + 4 * MOMENTS[self._training.optimizer]
        samples = plan.micro_batch_size // shape.parts
        bytes_of = [
            self._stage_bytes(samples, stage, plan.tp, number in shape.recompute)
            for number, stage in enumerate(plan.stages)
        ]
        totals = []
        for device, holding in enumerate(shape.holdings):
            stages = [plan.stages[number] for number in holding.stages]
            elements = self._work.elements(plan, tuple(span for stage in stages for span in stage.operations))
            shards = plan.dp * stages[0].replicas if plan.shard_optimizer else 1
            state = elements * (weight + self._training.sync_bytes + optimizer / shards)
            for stage, versions in zip(stages, holding.versions, strict=True):
                if versions > 1:
                    state += (versions - 1) * weight * self._work.elements(plan, stage.operations)
            here = [bytes_of[number] for number in holding.stages]
            activations = max(sum(map(StageBytes.of, here, moment)) for moment in holding.peaks)
            fixed, working = sum(each.fixed for each in here), max(each.working for each in here)
            totals.append(state + fixed + activations + working + message_bytes(shape, bytes_of, device))
        return tuple(FRAGMENTATION * total for total in totals)

    def _make_stage_bytes(self, samples: int, stage: StagePlan, tp: int, recompute: bool) -> StageBytes:
        samples, divisor = self._work.slice_of(samples, stage.replicas)
        tables = self._work.tables(samples)
        received = tables.work.crossing[stage.operations[0][0]] / divisor
        saved = active = tables.saved(stage.operations, tp) / divisor
        if recompute:
            dropped = without(stage.operations, self._work.kept(samples, stage))
            active = saved - tables.saved(dropped, tp) / divisor
        again = saved - active
        if not self._training.recompute_ends:  # the backward recomputes one block at a time
            again /= max(1, tables.blocks_of(stage.operations))
        return StageBytes(
            in_flight=active + received,
            recomputed=again,
            deferred=tables.deferred(stage.operations, tp) / divisor,
            fixed=tables.fixed(stage.operations, tp),
            working=tables.working(stage.operations, tp) / divisor,
            received=received,
            sent=tables.work.crossing[stage.operations[-1][1]] / divisor,
        )
