"""A Plan's bytes per pipeline device from sums over tables: fast enough for the thousands of Plans of a search.

``auto3d.cost.device_memory`` counts the same bytes tensor by tensor from the Graph. The sums here also cover
precisions of other systems and models that are known by their layers.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from auto3d.cost.model_work import ModelWork
from auto3d.cost.stage_bytes import NO_BYTES, StageBytes, message_bytes
from auto3d.cost.tables import without
from auto3d.cost.training_options import FRAGMENTATION as FRAGMENTATION
from auto3d.cost.training_options import TrainingOptions
from auto3d.plan import Plan, StagePlan
from auto3d.schedule.in_flight import loads_of, moments
from auto3d.schedule.shape import Shape, shape_of
from auto3d.simulate.memory_timeline import BytesOverTime
from auto3d.simulate.simulate import Timeline


class PlanMemory:
    """Estimates the memory of Plans of one model."""

    def __init__(self, work: ModelWork, training: TrainingOptions) -> None:
        self._work, self._training = work, training
        self._stage_bytes = lru_cache(2**16)(self._make_stage_bytes)  # the plans of a search have many stages in common

    def of(self, plan: Plan) -> tuple[float, ...]:
        """Peak bytes on each pipeline device, fragmentation included."""
        shape, stages = shape_of(plan), dict(enumerate(plan.stages))
        return tuple(self._of_device(plan, shape, device, stages) for device in range(len(shape.holdings)))

    def over_time(self, plan: Plan, timeline: Timeline, devices: Sequence[int]) -> list[BytesOverTime]:
        """The bytes that each of ``devices`` holds over ``timeline``, a simulation of the schedule of ``plan``.

        Activations come and go with the operations. Weights, gradients, the optimizer's state, messages and temporaries
        count at their peak all the time, so the largest value is that of ``of``.
        """
        shape, stages = shape_of(plan), dict(enumerate(plan.stages))
        return [self._over_time(plan, shape, device, stages, timeline) for device in devices]

    def _over_time(
        self, plan: Plan, shape: Shape, device: int, stages: Mapping[int, StagePlan], timeline: Timeline
    ) -> BytesOverTime:
        constant, bytes_of = self._parts(plan, shape, device, stages)
        held_stages, first = shape.holdings[device].stages, timeline.work.bounds[device]
        times, held = [0.0], [self._training.fragmentation * constant]
        operations = timeline.schedule.operations[device]
        for index, at_end, counts in moments(operations, held_stages, timeline.schedule.recompute):
            loads = zip(held_stages, loads_of(counts), strict=True)
            times.append((timeline.end if at_end else timeline.start)[first + index])
            held.append(
                self._training.fragmentation * (constant + sum(bytes_of[number].of(load) for number, load in loads))
            )
        return BytesOverTime(times=times, held=held)

    def of_stage(self, plan: Plan, number: int, stage: StagePlan) -> dict[int, float]:
        """Pipeline device -> peak bytes of ``stage`` alone, for each device that holds stage ``number`` of ``plan``.

        A device with one stage needs exactly these bytes. A device with several needs at most the sum of theirs.
        """
        shape = shape_of(plan)
        homes = dict.fromkeys(shape.homes[number])
        return {device: self._of_device(plan, shape, device, {number: stage}) for device in homes}

    def _of_device(self, plan: Plan, shape: Shape, device: int, stages: Mapping[int, StagePlan]) -> float:
        """Peak bytes on ``device`` of those of its stages that are in ``stages``, a dict from number to stage."""
        constant, bytes_of = self._parts(plan, shape, device, stages)
        holding = shape.holdings[device]
        activations = max(
            sum(
                bytes_of[number].of(load)
                for number, load in zip(holding.stages, moment, strict=True)
                if number in stages
            )
            for moment in holding.peaks
        )
        return self._training.fragmentation * (constant + activations)

    def _parts(
        self, plan: Plan, shape: Shape, device: int, stages: Mapping[int, StagePlan]
    ) -> tuple[float, dict[int, StageBytes]]:
        """(bytes on ``device`` of all but activations, number of each of its ``stages`` -> the bytes of that stage)."""
        weight = self._training.weight_bytes
        optimizer = self._training.master_bytes + 4 * self._training.moments
        samples = plan.micro_batch_size // shape.parts
        holding = shape.holdings[device]
        here = [number for number in holding.stages if number in stages]
        bytes_of = {
            number: self._stage_bytes(
                samples, stages[number], plan.tp, plan.sequence_parallel, number in shape.recompute
            )
            for number in here
        }
        elements = self._work.elements(plan, tuple(span for number in here for span in stages[number].operations))
        shards = plan.dp * stages[here[0]].replicas if plan.shard_optimizer else 1
        gradients = self._training.sync_bytes + self._training.gradient_copies
        state = self._training.reserve_bytes + elements * (weight + gradients + optimizer / shards)
        for number, versions in zip(holding.stages, holding.versions, strict=True):
            if versions > 1 and number in stages:
                state += (versions - 1) * weight * self._work.elements(plan, stages[number].operations)
        fixed, working = sum(each.fixed for each in bytes_of.values()), max(each.working for each in bytes_of.values())
        messages = message_bytes(shape, [bytes_of.get(number, NO_BYTES) for number in range(shape.stages)], device)
        return state + fixed + working + messages, bytes_of

    def _make_stage_bytes(
        self, samples: int, stage: StagePlan, tp: int, sequence_parallel: bool, recompute: bool
    ) -> StageBytes:
        samples, divisor = self._work.slice_of(samples, stage.replicas)
        tables = self._work.tables(samples, tp, sequence_parallel)
        received = tables.work.crossing[stage.operations[0][0]] / divisor
        saved = active = tables.saved(stage.operations) / divisor
        if recompute:
            dropped = without(stage.operations, self._work.kept(samples, stage))
            active = saved - tables.saved(dropped) / divisor
        again = saved - active
        if recompute and not self._training.recompute_ends:
            # The forward keeps the input of each block, and the backward recomputes one block at a time.
            again /= max(1, tables.blocks_of(stage.operations))
            active += max(0.0, tables.block_inputs(dropped) / divisor - received)
        return StageBytes(
            in_flight=active + received,
            recomputed=again,
            deferred=tables.deferred(stage.operations) / divisor,
            fixed=tables.fixed(stage.operations),
            working=tables.working(stage.operations) / divisor,
            received=received,
            sent=tables.work.crossing[stage.operations[-1][1]] / divisor,
        )
