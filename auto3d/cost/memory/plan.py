"""The memory of a Plan: what its devices hold at each moment of the schedule, and the largest of these.

Stages that plans have in common are counted once, so that a search can ask for the memory of thousands of Plans.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from auto3d.cost.memory.device import ENTRIES, DeviceMemory, HeldTensor
from auto3d.cost.memory.fused_stage import FusedStages
from auto3d.cost.memory.needs import RECOMPUTING, DeviceNeeds, MomentCounts, highest_counts
from auto3d.cost.memory.stage import StageMemory
from auto3d.cost.memory.stage_bytes import KEPT, OwnStages, StageBytes, StageRun
from auto3d.cost.memory.weights import WeightBytes
from auto3d.cost.model_work import ModelWork
from auto3d.cost.tables import without
from auto3d.cost.tensors import Span
from auto3d.cost.training_options import TrainingOptions
from auto3d.plan import Plan, StagePlan
from auto3d.schedule.moments import COLUMN, Counts, all_moments, stages_of
from auto3d.schedule.shape import Shape, has_one_reader, shape_of, shares_of
from auto3d.share import share_of
from auto3d.simulate.memory_timeline import BytesOverTime
from auto3d.simulate.simulate import Timeline

_MESSAGES = {
    "posted": "receives of activations",
    "posted_gradients": "receives of gradients",
    "sent": "activations being sent",
    "sent_gradients": "gradients being sent",
    "posted_inputs": "receives of inputs",
    "sent_inputs": "inputs being sent",
}


@lru_cache(4096)
def _stages(shape: Shape) -> tuple[tuple[tuple[int, ...], frozenset[int]], ...]:
    """Per pipeline device, its stages, and the stages that follow another stage of the device on some pipe."""
    device_of = shape.device_of
    follow: list[set[int]] = [set() for _ in range(shape.devices)]
    for (stage, pipe), device in device_of.items():
        if device_of.get((stage - 1, pipe)) == device:
            follow[device].add(stage)
    return tuple((stages_of(shape, device), frozenset(follow[device])) for device in range(shape.devices))


class PlanMemory:
    """Estimates the memory of Plans of one model."""

    def __init__(self, work: ModelWork, training: TrainingOptions) -> None:
        self._work, self._training = work, training
        self._bytes: StageBytes = OwnStages(work, blockwise=not training.recompute_ends)
        if training.system is not None:
            self._bytes = FusedStages(work, training.system, blockwise=not training.recompute_ends)
        self._weights = WeightBytes(work, training, self._bytes.gradient_copies)
        self._stage = lru_cache(KEPT)(self._bytes.of)
        self._peaks = lru_cache(KEPT // 4)(lambda *key: list[float]())
        self._alone = lru_cache(KEPT // 4)(lambda *key: dict[StagePlan, dict[int, float]]())

    def of(self, plan: Plan) -> tuple[float, ...]:
        """Peak bytes of tensors on each pipeline device."""
        return tuple(self.one_by_one(plan))

    def one_by_one(self, plan: Plan) -> Iterator[float]:
        """The bytes of ``of``, device by device, when they are asked for."""
        shape = shape_of(plan)
        known = self._peaks(shape, plan.stages, *self._degrees(plan))
        for device in range(shape.devices):
            if device == len(known):
                known.append(self.of_device(plan, device))
            yield known[device]

    def of_device(self, plan: Plan, device: int) -> float:
        """Peak bytes of tensors on pipeline device ``device``."""
        return float(self._device(plan, device).totals().max())

    def at_least(self, plan: Plan, device: int, kept_from: Mapping[int, np.ndarray]) -> np.ndarray | None:
        """[variants]: lower bounds of the peak bytes of ``device`` where its stages keep other parts of themselves.

        ``kept_from`` has, for each stage of the device, the position in each variant from which it keeps its
        operations until its end. None if there is no bound for the model or the plan. It takes a fraction of the time
        of an estimate, since it counts only what a micro-batch in flight and its recomputation surely hold.
        """
        shape, (numbers, follow) = shape_of(plan), _stages(shape_of(plan))[device]
        stages, bounds = {number: replace(plan.stages[number], kept=()) for number in numbers}, []
        for number, stage in stages.items():
            if (bound := self._bytes.saved_from(self._run(plan, number, stage), kept_from[number])) is None:
                return None
            bounds.append(bound)
        needs = self._device(plan, device, stages)
        per_count = needs.per_count.copy()
        per_count[:, [COLUMN.recomputed, COLUMN.sent]] = 0
        for row, number in enumerate(numbers):
            if number in follow:  # its input may be a tensor of the stage before
                per_count[row, COLUMN.in_flight] -= needs.stages[number].received
        least = np.repeat(replace(needs, per_count=per_count).quiet()[:, None], len(kept_from[numbers[0]]), axis=1)
        for row, (number, (saved, rest)) in enumerate(zip(numbers, bounds, strict=True)):
            counts = needs.moments.of_stage(row)
            again = np.array([k[0] in RECOMPUTING and k[1] == number and not k[2] for k in needs.moments.keys])
            least += counts.in_flight[:, None] * saved + counts.recomputed[:, None] * rest
            if number in shape.recompute:  # the operations that were kept are over when the others run again
                least += again[:, None] * np.maximum(0.0, rest - saved)
        return least.max(axis=0)

    def of_stage(self, plan: Plan, number: int, stage: StagePlan) -> dict[int, float]:
        """Pipeline device -> peak bytes of ``stage`` alone, for each device that holds stage ``number`` of ``plan``.

        A device with one stage needs exactly these bytes. A device with several needs at most the sum of theirs.
        """
        shape = shape_of(plan)
        known = self._alone(shape, number, *self._degrees(plan))
        if stage not in known:
            known[stage] = {
                device: float(self._device(plan, device, {number: stage}).totals().max())
                for device in dict.fromkeys(shape.homes[number])
            }
        return known[stage]

    def beside_activations(self, plan: Plan) -> tuple[float, ...]:
        """Per pipeline device, the peak of the bytes that are no activations: what ``of`` counts, at the operation
        that needs most of them. What a backward recomputes inside itself is an activation."""
        every = (self._device(plan, device) for device in range(shape_of(plan).devices))
        return tuple(float((needs.totals() - needs.activations()).max()) for needs in every)

    def stage_if(self, plan: Plan, number: int, *, recompute: bool, split: bool) -> StageMemory:
        """Stage ``number`` of ``plan`` if it recomputes, or splits its backward, or does neither."""
        return self._stage(self._run(plan, number, plan.stages[number])._replace(recompute=recompute, split=split))

    def devices(self, plan: Plan) -> tuple[DeviceMemory, ...]:
        """The peak of each pipeline device with its witness."""
        return tuple(self._witness(plan, self._device(plan, device)) for device in range(shape_of(plan).devices))

    def largest(self, plan: Plan, device: int, count: int | None = 10) -> tuple[HeldTensor, ...]:
        """The ``count`` largest tensors of ``device`` at its peak, largest first; None: all.

        The tensors of each entry of the witness add up to it.
        """
        needs = self._device(plan, device)
        moment = needs.moments.moments[int(needs.totals().argmax())]
        tensors = [HeldTensor(name="context and libraries", kind="reserve", bytes=needs.constant["reserve"], count=1)]
        runs = [self._run(plan, number, plan.stages[number]) for number in needs.stages]
        unmade = frozenset[int]()
        for number, run, held, row in zip(needs.stages, runs, moment.counts, needs.per_count.tolist(), strict=True):
            for tensor in self._bytes.tensors(run):
                if not (tensor.is_received and number in needs.local):
                    many = getattr(held, tensor.count) / len(run.shares)
                    tensors.append(HeldTensor(name=tensor.name, kind=tensor.kind, bytes=tensor.bytes, count=many))
            for field, name in _MESSAGES.items():
                size, many = row[getattr(COLUMN, field)], getattr(held, field)
                tensors.append(HeldTensor(name=name, kind="messages", bytes=size, count=many))
            if needs.weights.private and needs.stages[number].private and not held.gradients:
                unmade |= self._bytes.private(run, share_of(plan))
        older = [held.older for held in moment.counts]
        tensors += self._weights.tensors(runs, share_of(plan), older=older, unmade=unmade, shards=needs.weights.shards)
        if moment.summing:
            tensors.append(HeldTensor(name="sums of gradients", kind="messages", bytes=needs.weights.summed, count=1))
        working = needs.peak_of(moment.key)
        name = self._operation(plan, working.position) or "the update"
        tensors.append(HeldTensor(name=name, kind="working", bytes=working.size, count=1))
        counts: dict[tuple[str, str, float], float] = {}
        for held_tensor in tensors:
            if held_tensor.total:
                key = held_tensor.name, held_tensor.kind, held_tensor.bytes
                counts[key] = counts.get(key, 0) + held_tensor.count
        listed = [HeldTensor(name=key[0], kind=key[1], bytes=key[2], count=many) for key, many in counts.items()]
        return tuple(sorted(listed, key=lambda held_tensor: held_tensor.total, reverse=True)[:count])

    def over_time(self, plan: Plan, timeline: Timeline, devices: Sequence[int]) -> list[BytesOverTime]:
        """The bytes that each of ``devices`` holds over ``timeline``, a simulation of the schedule of ``plan``.

        From the start of an operation to its end it holds the bytes of the operation's peak; then, until the next
        operation, the bytes that the next operation finds, without its temporaries. The largest value is the result of
        ``of``.
        """
        every = all_moments(timeline.schedule, read_once=self._reads_once(plan, shape_of(plan)))
        return [
            _over_time(replace(self._device(plan, device), moments=MomentCounts(every[device])), device, timeline)
            for device in devices
        ]

    def _witness(self, plan: Plan, needs: DeviceNeeds) -> DeviceMemory:
        row = int(needs.totals().argmax())
        moment, working = needs.moments.moments[row], needs.peak_of(needs.moments.keys[row])
        entries = dict.fromkeys(ENTRIES, 0.0) | needs.constant
        held = Counts(*(needs.per_count * np.array(moment.counts)).sum(axis=0).tolist())
        inputs = sum(
            counts.in_flight * (stage.inputs - (stage.received if number in needs.local else 0.0))
            for counts, (number, stage) in zip(moment.counts, needs.stages.items(), strict=True)
        )
        messages = sum(getattr(held, name) for name in _MESSAGES)
        entries["inputs"] += inputs
        entries["activations"] += held.in_flight - inputs
        entries["activations"] += held.recomputed + held.deferred + held.slice_gradients
        entries["gradients"] += held.gradients
        entries["versions"] += held.older
        entries["messages"] += messages + needs.weights.summed * moment.summing
        entries["working"] += working.size
        rounded = {name: round(entries[name]) for name in ENTRIES}
        return DeviceMemory(**rounded, at=str(moment.operation), operation=self._operation(plan, working.position))

    def _operation(self, plan: Plan, position: int) -> str:
        if position < 0:
            return ""
        tensors = self._work.work_at(self._samples(plan), share_of(plan)).tensors
        if (self._bytes.in_whole or len(shares_of(plan)) > 1) and tensors.begins is not None:
            position = int(tensors.begins[position])  # a fused stage and slices have the whole Graph's positions
        return tensors.operations[position] if position < len(tensors.operations) else ""

    def _degrees(self, plan: Plan) -> tuple:
        """What decides the memory of stages of ``plan`` beside the stages and its shape."""
        return self._samples(plan), share_of(plan), shares_of(plan), plan.dp, plan.gradient_sum.splits

    def _reads_once(self, plan: Plan, shape: Shape) -> bool:
        return self._training.read_once and has_one_reader(plan, shape)

    def _inputs_for_others(self, plan: Plan, here: Mapping[int, tuple[Span, ...]]) -> dict[int, tuple[float, float]]:
        """What stage 0 reads for others, of each stage of a device, of operations ``here``: bytes of one message to it,
        and bytes that stage 0 sends to other devices; both without inputs that stage 0 needs and holds itself."""
        tables = self._work.tables(self._samples(plan), share_of(plan))
        if 0 not in here:
            return {number: (tables.inputs(operations), 0.0) for number, operations in here.items()}
        own = here[0]
        elsewhere = without(((0, len(tables.work)),), sorted(span for spans in here.values() for span in spans))
        of_others = {number: (tables.inputs(operations, own), 0.0) for number, operations in here.items()}
        return of_others | {0: (0.0, tables.inputs(elsewhere, own))}

    def _samples(self, plan: Plan) -> int:
        return plan.micro_batch_size // shape_of(plan).sample_parts

    def _run(self, plan: Plan, number: int, stage: StagePlan) -> StageRun:
        """How the ranks of ``plan`` would run its stage ``number`` if it were ``stage``."""
        shape = shape_of(plan)
        return StageRun(stage, self._samples(plan), shares_of(plan), number in shape.recompute, number in shape.split)

    def _device(self, plan: Plan, device: int, stages: Mapping[int, StagePlan] | None = None) -> DeviceNeeds:
        """What ``device`` needs for ``stages``, a dict from number to stage: some of its own (default: all of them)."""
        training, shape = self._training, shape_of(plan)
        numbers, follow = _stages(shape)[device]
        if stages is None:
            stages = {number: plan.stages[number] for number in numbers}
        here = [number for number in numbers if number in stages]
        samples, shares = self._samples(plan), shares_of(plan)
        memory_of = {
            n: self._stage(StageRun(stages[n], samples, shares, n in shape.recompute, n in shape.split)) for n in here
        }
        held = self._weights.of(
            samples,
            share_of(plan),
            shares,
            tuple((stages[number].operations, stages[number].replicas) for number in here),
            max(len(set(shape.homes[number])) * plan.dp * stages[number].replicas for number in here),
            plan.gradient_sum.splits,
            shape.asynchronous,
        )
        reserve = training.reserve_bytes
        if training.workspace_bytes:
            tables = self._work.tables(samples, share_of(plan))
            reserve += training.workspace_bytes * any(tables.products(stages[number].operations) for number in here)
        constant = {"reserve": reserve, **held.constant}
        made = sum(memory.private for memory in memory_of.values()) if held.private else 0.0
        constant["gradients"] = max(0.0, constant["gradients"] - made)
        # What a stage of the same device sends is the same tensor on both sides.
        local = {number for number in follow if number in memory_of and number - 1 in memory_of}
        local = {number for number in local if memory_of[number - 1].sent_beside == 0}
        inputs = dict.fromkeys(here, (0.0, 0.0))
        if read_once := self._reads_once(plan, shape):
            inputs = self._inputs_for_others(plan, {number: stages[number].operations for number in here})
        per_count = np.zeros((len(numbers), len(COLUMN)))
        for (number, memory), version in zip(memory_of.items(), held.versions, strict=True):
            of_message, of_all = inputs[number]
            per_count[numbers.index(number)] = Counts(
                in_flight=memory.in_flight - (memory.received if number in local else 0.0),
                recomputed=memory.recomputed,
                deferred=memory.deferred,
                slice_gradients=memory.slice_gradient,
                gradients=memory.private if held.private else 0.0,
                older=version,
                posted=memory.received,
                posted_gradients=memory.sent_gradient,
                sent=memory.sent_beside,
                sent_gradients=memory.received_gradient,
                posted_inputs=of_message,
                sent_inputs=of_all,
            )
        return DeviceNeeds(
            moments=highest_counts(shape, device, read_once),
            constant=constant,
            stages=memory_of,
            per_count=per_count,
            weights=held,
            local=frozenset(local),
            split=shape.split,
        )


def _over_time(needs: DeviceNeeds, device: int, timeline: Timeline) -> BytesOverTime:
    """``PlanMemory.over_time`` of a device that ``needs`` this at all moments of the timeline."""
    first, moments = timeline.work.numbered.bounds[device], needs.moments.moments
    totals, quiet, idle = needs.totals(), needs.quiet(), needs.idle
    times, held = [0.0], [idle]
    for index, moment in enumerate(moments):
        times += [timeline.start[first + index], timeline.end[first + index]]
        ended = float(quiet[index])
        if index + 1 < len(moments):
            ended = min(ended, float(quiet[index + 1]))
        elif not moment.operation.micro_batches:
            ended = idle
        held += [float(totals[index]), ended]
    return BytesOverTime(times=[*times, max(times[-1], timeline.makespan)], held=[*held, idle])
