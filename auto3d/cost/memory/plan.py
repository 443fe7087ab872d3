"""The memory of a Plan: what its devices hold at each moment of the schedule, and the largest of these.

Stages that plans have in common are counted once, so that a search can ask for the memory of thousands of Plans.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from auto3d.cost.memory.device import ENTRIES, DeviceMemory, HeldTensor
from auto3d.cost.memory.fused_stage import fused_stage_memory
from auto3d.cost.memory.segment import Peak, held_memories
from auto3d.cost.memory.stage import StageMemory, private_parameters, stage_memory
from auto3d.cost.memory.tensors import Tensors
from auto3d.cost.model_work import ModelWork
from auto3d.cost.tables import without
from auto3d.cost.training_options import TrainingOptions
from auto3d.plan import Plan, StagePlan
from auto3d.schedule.moments import COUNTS, Key, Moment, all_moments, highest_moments, stages_of
from auto3d.schedule.operation import Kind
from auto3d.schedule.shape import Shape, shape_of
from auto3d.simulate.memory_timeline import BytesOverTime
from auto3d.simulate.simulate import Timeline

_NONE = Peak(size=0.0, position=-1)
_ACTIVATIONS = COUNTS[:3]  # in flight, recomputed, deferred
_RECOMPUTING = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_MESSAGES = {
    "posted": "receives of activations",
    "posted_gradients": "receives of gradients",
    "sent": "activations being sent",
    "sent_gradients": "gradients being sent",
}
_FIRST_MESSAGE = len(COUNTS) - len(_MESSAGES)  # index of the first count of messages


@dataclass(frozen=True, kw_only=True)
class _State:
    """Bytes of the state of one stage that do not depend on micro-batches, and elements of its trained parameters."""

    elements: float
    optimizer: float
    fixed: float  # buffers and constants
    copies: float  # copies of one version of the weights in low precision
    update: float  # temporaries of the update of its parameters


class _Moments:
    """Moments of one device as a matrix of counts: a row for each, and all counts of its stages one after the other."""

    def __init__(self, moments: Sequence[Moment]) -> None:
        self.moments = moments
        self.keys = [moment.key for moment in moments]
        self.counts = np.array([one.counts for one in moments], dtype=float)
        distinct = list(dict.fromkeys(self.keys))
        self.distinct = distinct
        self.key_of = np.array([distinct.index(key) for key in self.keys])


@lru_cache(1024)
def _highest(shape: Shape) -> tuple[_Moments, ...]:
    return tuple(_Moments(moments) for moments in highest_moments(shape))


@dataclass(frozen=True, kw_only=True)
class _Device:
    """What a device with these stages needs: a constant, bytes per count of its moments, and peaks of operations."""

    constant: dict[str, float]  # entry of DeviceMemory -> bytes that it holds all the time
    stages: dict[int, StageMemory]
    per_count: np.ndarray  # [stages × counts]
    update: float
    summed: float  # gradients of other ranks, from the first sum until the update
    shards: int  # ranks that share the state of the optimizer
    private: bool  # whether backwards make the gradients of private parameters
    split: frozenset[int]  # stages with weight halves; a B of one runs both halves, one after the other

    def peak_of(self, key: Key) -> Peak:
        """What the operation of a moment with this key needs beyond what the device holds."""
        kind, stage, recomputed, makes_gradients, _ = key
        if kind is Kind.UPDATE:
            return Peak(size=self.update, position=-1)
        found = self.stages.get(stage)
        if found is None or kind is Kind.SYNC:
            return _NONE
        if kind is Kind.FORWARD:
            return found.forward
        if kind is Kind.RECOMPUTE:
            return found.recompute
        if kind is Kind.BACKWARD_WEIGHT:
            if makes_gradients and self.private:
                return replace(found.weight_half, size=found.weight_half.size + found.private)
            return found.weight_half
        makes_gradients &= self.private
        peak = found.first_backward if makes_gradients else found.backward
        if recomputed:
            peak = found.after_recompute
        if kind is Kind.BACKWARD and stage in self.split:
            freed = found.in_flight + (found.recomputed if recomputed else 0.0)
            half = found.weight_half.size + (found.private if makes_gradients else 0.0) + found.deferred - freed
            if half > peak.size:
                return replace(found.weight_half, size=half)
        return peak

    def totals(self, moments: _Moments) -> np.ndarray:
        """Bytes at each of ``moments``."""
        peaks = np.array([self.peak_of(key).size + self.summed * key[4] for key in moments.distinct])
        return sum(self.constant.values()) + moments.counts @ self.per_count + peaks[moments.key_of]


class PlanMemory:
    """Estimates the memory of Plans of one model."""

    def __init__(self, work: ModelWork, training: TrainingOptions) -> None:
        self._work, self._training = work, training
        self._stage = lru_cache(2**16)(self._make_stage)  # the plans of a search have many stages in common
        self._state = lru_cache(2**16)(self._make_state)

    def of(self, plan: Plan) -> tuple[float, ...]:
        """Peak bytes of tensors on each pipeline device."""
        return tuple(self.one_by_one(plan))

    def one_by_one(self, plan: Plan) -> Iterator[float]:
        """Those of ``of``, each when it is asked for."""
        shape, stages = shape_of(plan), dict(enumerate(plan.stages))
        for device, moments in enumerate(_highest(shape)):
            yield float(self._device(plan, shape, device, stages).totals(moments).max())

    def of_stage(self, plan: Plan, number: int, stage: StagePlan) -> dict[int, float]:
        """Pipeline device -> peak bytes of ``stage`` alone, for each device that holds stage ``number`` of ``plan``.

        A device with one stage needs exactly these bytes. A device with several needs at most the sum of theirs.
        """
        shape = shape_of(plan)
        moments = _highest(shape)
        return {
            device: float(self._device(plan, shape, device, {number: stage}).totals(moments[device]).max())
            for device in dict.fromkeys(shape.homes[number])
        }

    def beside_activations(self, plan: Plan) -> tuple[float, ...]:
        """Per pipeline device, the peak of the bytes that are no activations: what ``of`` counts, at the operation
        that needs most of them. What a backward recomputes inside itself is an activation."""
        shape, stages = shape_of(plan), dict(enumerate(plan.stages))
        found = []
        for device, moments in enumerate(_highest(shape)):
            needs = self._device(plan, shape, device, stages)
            per_count = needs.per_count.reshape(-1, len(COUNTS)).copy()
            per_count[:, len(_ACTIVATIONS) :] = 0
            inside = [
                needs.stages[stage].recomputed if kind in _RECOMPUTING and not recomputed else 0.0
                for kind, stage, recomputed, _, _ in moments.keys
            ]
            activations = moments.counts @ per_count.ravel() + np.array(inside)
            found.append(float((needs.totals(moments) - activations).max()))
        return tuple(found)

    def stage_if(self, plan: Plan, number: int, *, recompute: bool, split: bool) -> StageMemory:
        """Stage ``number`` of ``plan`` if it recomputes, or splits its backward, or does neither."""
        samples, degree = self._samples(plan), (plan.tp, plan.sequence_parallel)
        return self._stage(samples, plan.stages[number], *degree, recompute, split)

    def devices(self, plan: Plan) -> tuple[DeviceMemory, ...]:
        """The peak of each pipeline device with its witness."""
        shape, stages = shape_of(plan), dict(enumerate(plan.stages))
        found = []
        for device, moments in enumerate(_highest(shape)):
            needs = self._device(plan, shape, device, stages)
            found.append(self._witness(plan, needs, moments, stages))
        return tuple(found)

    def largest(self, plan: Plan, device: int, count: int = 10) -> tuple[HeldTensor, ...]:
        """The ``count`` largest tensors of ``device`` at its peak, largest first."""
        shape, stages = shape_of(plan), dict(enumerate(plan.stages))
        needs, moments = self._device(plan, shape, device, stages), _highest(shape)[device]
        moment = moments.moments[int(needs.totals(moments).argmax())]
        found: list[HeldTensor] = []
        seen: set[int] = set()
        per_count = needs.per_count.reshape(-1, len(COUNTS))
        for place, number in enumerate(stages_of(shape, device)):
            held = dict(zip(COUNTS, moment.counts[place * len(COUNTS) :], strict=False))
            found += self._held_tensors(plan, shape, number, needs, held, seen)
            for name, size in zip(COUNTS[_FIRST_MESSAGE:], per_count[place, _FIRST_MESSAGE:].tolist(), strict=True):
                if size * held[name]:
                    found.append(HeldTensor(name=_MESSAGES[name], kind="messages", bytes=size, count=held[name]))
        if needs.summed and moment.summing:
            found.append(HeldTensor(name="sums of gradients", kind="messages", bytes=needs.summed, count=1))
        working = needs.peak_of(moment.key)
        if working.size:
            name = self._operation(plan, working.position) or "the update"
            found.append(HeldTensor(name=name, kind="working", bytes=working.size, count=1))
        return tuple(sorted(found, key=lambda each: each.total, reverse=True)[:count])

    def over_time(self, plan: Plan, timeline: Timeline, devices: Sequence[int]) -> list[BytesOverTime]:
        """The bytes that each of ``devices`` holds over ``timeline``, a simulation of the schedule of ``plan``.

        From the start of each operation to its end they are those of its peak; then until the next operation those
        that the next one finds, without its temporaries. Their largest value is that of ``of``.
        """
        shape, stages = shape_of(plan), dict(enumerate(plan.stages))
        every = all_moments(timeline.schedule)
        return [
            self._over_time(self._device(plan, shape, device, stages), _Moments(every[device]), device, timeline)
            for device in devices
        ]

    def _over_time(self, needs: _Device, moments: _Moments, device: int, timeline: Timeline) -> BytesOverTime:
        first = timeline.work.bounds[device]
        totals = needs.totals(moments)
        idle = sum(needs.constant.values())
        quiet = idle + moments.counts @ needs.per_count
        times, held = [0.0], [idle]
        for index, moment in enumerate(moments.moments):
            times += [timeline.start[first + index], timeline.end[first + index]]
            ended = float(quiet[index])
            if index + 1 < len(moments.moments):
                ended = min(ended, float(quiet[index + 1]))
            elif not moment.operation.micro_batches:
                ended = idle
            held += [float(totals[index]), ended]
        return BytesOverTime(times=[*times, max(times[-1], timeline.makespan)], held=[*held, idle])

    def _witness(self, plan: Plan, needs: _Device, moments: _Moments, stages: Mapping[int, StagePlan]) -> DeviceMemory:
        row = int(needs.totals(moments).argmax())
        moment, working = moments.moments[row], needs.peak_of(moments.keys[row])
        entries = dict.fromkeys(ENTRIES, 0.0) | needs.constant
        per_stage = needs.per_count.reshape(-1, len(COUNTS)) * moments.counts[row].reshape(-1, len(COUNTS))
        held = dict(zip(COUNTS, per_stage.sum(axis=0).tolist(), strict=True))
        in_flight = moment.counts[:: len(COUNTS)]
        inputs = sum(n * found.inputs for n, found in zip(in_flight, needs.stages.values(), strict=True))
        entries["inputs"] += min(inputs, held["in_flight"])
        entries["activations"] += held["in_flight"] - min(inputs, held["in_flight"])
        entries["activations"] += held["recomputed"] + held["deferred"]
        entries["gradients"] += held["gradients"]
        entries["versions"] += held["older"]
        entries["messages"] += sum(held[name] for name in COUNTS[_FIRST_MESSAGE:]) + (
            needs.summed if moment.summing else 0.0
        )
        entries["working"] += working.size
        rounded = {name: round(entries[name]) for name in ENTRIES}
        return DeviceMemory(**rounded, at=str(moment.operation), operation=self._operation(plan, working.position))

    def _operation(self, plan: Plan, position: int) -> str:
        if position < 0:
            return ""
        tensors = self._tensors(plan, self._samples(plan))
        if self._training.system is not None and tensors.begins is not None:
            position = int(tensors.begins[position])  # the positions of a fused stage are the whole Graph's
        return tensors.operations[position] if position < len(tensors.operations) else ""

    def _held_tensors(
        self, plan: Plan, shape: Shape, number: int, needs: _Device, held: Mapping[str, int], seen: set[int]
    ) -> list[HeldTensor]:
        """The tensors of stage ``number``, without the parameters in ``seen``, to which it adds its own."""
        stage = plan.stages[number]
        tensors = self._tensors(plan, self._samples(plan) // stage.replicas)
        spans = _local(tensors, stage.operations)
        found = []
        dropped = _local(tensors, self._dropped(plan, shape, number, stage))
        kept = without(spans, dropped) if dropped else spans
        fused = self._training.system is not None
        of_forward: dict[int, str] = {}
        again: dict[int, str] = {}
        if not fused:
            of_stage = held_memories(tensors, spans, spans)
            of_forward = {memory: kind for memory, kind in of_stage.items() if kind == "inputs"}
            of_forward |= held_memories(tensors, kept, spans) if kept else {}
            again = held_memories(tensors, dropped, spans) if dropped else {}
            again = {memory: kind for memory, kind in again.items() if memory not in of_forward}
        if fused:
            found += self._saved_by_kernels(plan, stage, self._dropped(plan, shape, number, stage), held)
        for memories, count in ((of_forward, held["in_flight"] + held["deferred"]), (again, held["recomputed"])):
            found += [
                HeldTensor(name=tensors.names[memory], kind=kind, bytes=float(tensors.size[memory]), count=count)
                for memory, kind in memories.items()
                if count
            ]
        fixed = self._state(self._samples(plan), stage, plan.tp, plan.sequence_parallel).fixed
        if fixed:
            found.append(HeldTensor(name="buffers and constants", kind="weights", bytes=fixed, count=1))
        optimizer = (self._training.master_bytes / 4 + self._training.moments) / needs.shards
        unmade = private_parameters(tensors, spans, dropped) if needs.private and not held["gradients"] else frozenset()
        for first, last in spans:
            inside = slice(*np.searchsorted(tensors.state_at, (first, last)))
            for parameter in dict.fromkeys(tensors.state_of[inside].tolist()):
                if parameter in seen:
                    continue
                seen.add(parameter)
                name, size = tensors.parameters[parameter], float(tensors.gradient[parameter])
                counts = {
                    "weights": 1.0,
                    "versions": held["older"],
                    "gradients": float(parameter not in unmade),
                    "optimizer": optimizer,
                }
                found += [HeldTensor(name=name, kind=kind, bytes=size, count=n) for kind, n in counts.items() if n]
        return found

    def _saved_by_kernels(
        self, plan: Plan, stage: StagePlan, dropped: Sequence[tuple[int, int]], held: Mapping[str, int]
    ) -> list[HeldTensor]:
        """What the kernels of another system save, by the operations that run them."""
        samples = self._samples(plan) // stage.replicas
        work = self._work.work_at(samples, plan.tp, plan.sequence_parallel)
        tensors = work.tensors
        found = []
        for first, last in without(stage.operations, dropped) if dropped else stage.operations:
            for position in range(first, last):
                if size := float(work.saved[position]):
                    name = tensors.operations[_local(tensors, ((position, position),))[0][0]]
                    count = held["in_flight"] + held["deferred"]
                    found.append(HeldTensor(name=f"saved by {name}", kind="activations", bytes=size, count=count))
        return found

    def _samples(self, plan: Plan) -> int:
        return plan.micro_batch_size // shape_of(plan).parts

    def _tensors(self, plan: Plan, samples: int) -> Tensors:
        return self._work.work_at(samples, plan.tp, plan.sequence_parallel).tensors

    def _device(self, plan: Plan, shape: Shape, device: int, stages: Mapping[int, StagePlan]) -> _Device:
        """What ``device`` needs for those of its stages that are in ``stages``, a dict from number to stage."""
        training, samples = self._training, plan.micro_batch_size // shape.parts
        numbers = stages_of(shape, device)
        here = [number for number in numbers if number in stages]
        degree = plan.tp, plan.sequence_parallel
        found = {
            number: self._stage(samples, stages[number], *degree, number in shape.recompute, number in shape.split)
            for number in here
        }
        state = {number: self._state(samples, stages[number], *degree) for number in here}
        tables = self._work.tables(self._work.slice_of(samples, stages[here[0]].replicas)[0], *degree)
        elements = tables.parameters(tuple(span for number in here for span in stages[number].operations))
        holders = [len(set(shape.homes[number])) * plan.dp * stages[number].replicas for number in here]
        shards = max(holders) if plan.shard_optimizer else 1
        own = sum(each.elements for each in state.values())
        once = elements / own if own else 1.0  # parameters that several stages of the device share count once
        gradients = elements * (training.sync_bytes + (training.system.gradient_copies if training.system else 0.0))
        private = training.backward_makes_gradients and max(holders) == 1 and not shape.asynchronous
        if private:
            gradients -= sum(each.private for each in found.values())
        constant = {
            "reserve": training.reserve_bytes,
            "weights": elements * training.weight_bytes + sum(each.fixed for each in state.values()),
            "copies": sum(each.copies for each in state.values()),
            "gradients": max(0.0, gradients),
            "optimizer": once * (sum(each.optimizer for each in state.values()) + training.master_bytes * own) / shards,
        }
        per_count = np.zeros((len(numbers), len(COUNTS)))
        for row, number in enumerate(numbers):
            if number not in stages:
                continue
            one, kept = found[number], state[number]
            local = any(
                shape.device_of.get((number - 1, pipe)) == device == shape.device_of[number, pipe]
                for pipe in range(shape.pipes)
            )
            # What a stage of the same device sends is the same tensor on both sides.
            shares = local and (number - 1) in found and found[number - 1].sent_beside == 0
            per_count[row] = (
                one.in_flight - (one.received if shares else 0.0),
                one.recomputed,
                one.deferred,
                one.private if private else 0.0,
                kept.elements * training.weight_bytes + kept.copies,
                one.received,
                one.sent_gradient,
                one.sent_beside,
                one.received_gradient,
            )
        update = max((each.update for each in state.values()), default=0.0)
        if plan.shard_optimizer and shards > 1:
            update = training.update_copies[0] * elements * training.sync_bytes / shards
        summed = training.sums_have_copies and plan.shard_optimizer and shards > 1
        return _Device(
            constant=constant,
            stages=found,
            per_count=per_count.ravel(),
            update=update,
            summed=elements * training.sync_bytes * (shards - 1) / shards if summed else 0.0,
            private=private,
            split=shape.split,
            shards=shards,
        )

    def _dropped(self, plan: Plan, shape: Shape, number: int, stage: StagePlan) -> tuple[tuple[int, int], ...]:
        if number not in shape.recompute:
            return ()
        return without(stage.operations, self._work.kept(self._samples(plan) // stage.replicas, stage))

    def _make_stage(
        self,
        samples: int,
        stage: StagePlan,
        tp: int,
        sequence_parallel: bool,
        recompute: bool,
        split: bool,
    ) -> StageMemory:
        samples, divisor = self._work.slice_of(samples, stage.replicas)
        work = self._work.work_at(samples, tp, sequence_parallel)
        dropped = without(stage.operations, self._work.kept(samples, stage)) if recompute else ()
        block = None
        if self._training.system is not None:
            tables = self._work.tables(samples, tp, sequence_parallel)
            blockwise = not self._training.recompute_ends
            return fused_stage_memory(tables, stage.operations, dropped, blockwise=blockwise).divided(divisor)
        if dropped and not self._training.recompute_ends:
            block = self._work.tables(samples, tp, sequence_parallel).last_block(dropped)
        tensors = work.tensors
        found = stage_memory(
            tensors,
            _local(tensors, stage.operations),
            _local(tensors, dropped),
            split=split,
            block=None if block is None else _local(tensors, (block,))[0],
        )
        if block is not None:
            tables = self._work.tables(samples, tp, sequence_parallel)
            inputs = max(0.0, tables.block_inputs(dropped) - found.received)
            found = replace(found, in_flight=found.in_flight + inputs, inputs=found.inputs + inputs)
        return found.divided(divisor)

    def _make_state(self, samples: int, stage: StagePlan, tp: int, sequence_parallel: bool) -> _State:
        samples, _ = self._work.slice_of(samples, stage.replicas)
        tables = self._work.tables(samples, tp, sequence_parallel)
        tensors = tables.work.tensors
        used: dict[int, None] = {}
        for first, last in _local(tensors, stage.operations):
            inside = slice(*np.searchsorted(tensors.state_at, (first, last)))
            used |= dict.fromkeys(tensors.state_of[inside].tolist())
        numbers = np.array(list(used), dtype=int)
        elements = tables.parameters(stage.operations)
        optimizer = 4 * self._training.moments * elements
        if (state_elements := self._training.state_elements) is not None:
            optimizer = float(sum(4 * state_elements(tensors.shapes[number]) for number in used))
        copies = float(tensors.low_gradient[numbers].sum())
        of_this, of_the_last = self._training.update_copies
        sizes = [0.0, *tensors.gradient[numbers].tolist(), 0.0]
        return _State(
            elements=elements,
            optimizer=optimizer,
            fixed=max(0.0, tables.fixed(stage.operations) - copies),
            copies=copies,
            update=max(of_this * size + of_the_last * before for before, size in pairwise(sizes)),
        )


def _local(tensors: Tensors, spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """``spans`` of the whole Graph as positions of the operations that a rank runs."""
    if tensors.begins is None:
        return tuple(spans)
    begins = tensors.begins
    return tuple((int(begins[first]), int(begins[last])) for first, last in spans)
