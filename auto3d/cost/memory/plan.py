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
from auto3d.cost.memory.parameters import local_spans, parameters_of
from auto3d.cost.memory.segment import Peak, Span
from auto3d.cost.memory.segments import Segments, earlier
from auto3d.cost.memory.stage import StageMemory, mean_of_slices, private_parameters, stage_memory
from auto3d.cost.memory.stage_tensors import StageTensor, fused_stage_tensors, stage_tensors
from auto3d.cost.model_work import ModelWork
from auto3d.cost.tables import WorkTables, without
from auto3d.cost.training_options import TrainingOptions
from auto3d.plan import Plan, StagePlan
from auto3d.schedule.moments import COUNTS, Key, Moment, all_moments, highest_moments, stages_of
from auto3d.schedule.operation import Kind
from auto3d.schedule.shape import Shape, has_one_reader, shape_of, shares_of
from auto3d.share import Share, share_of
from auto3d.simulate.memory_timeline import BytesOverTime
from auto3d.simulate.simulate import Timeline

_KEPT = 2**13  # results of each kind that are kept
_NONE = Peak(size=0.0, position=-1)
_ACTIVATIONS = COUNTS[:4]  # in flight, recomputed, deferred, gradients of slices
_RECOMPUTING = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_MESSAGES = {
    "posted": "receives of activations",
    "posted_gradients": "receives of gradients",
    "sent": "activations being sent",
    "sent_gradients": "gradients being sent",
    "posted_inputs": "receives of inputs",
    "sent_inputs": "inputs being sent",
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


@lru_cache(2**14)
def _highest(shape: Shape, device: int, read_once: bool) -> _Moments:
    return _Moments(highest_moments(shape, device, read_once=read_once))


@lru_cache(4096)
def _stages(shape: Shape) -> tuple[tuple[tuple[int, ...], frozenset[int]], ...]:
    """Per pipeline device, its stages, and the stages that follow another stage of the device on some pipe."""
    device_of = shape.device_of
    follow: list[set[int]] = [set() for _ in range(shape.devices)]
    for (stage, pipe), device in device_of.items():
        if device_of.get((stage - 1, pipe)) == device:
            follow[device].add(stage)
    return tuple((stages_of(shape, device), frozenset(follow[device])) for device in range(shape.devices))


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """What the weights of the stages of one device take, whatever they recompute."""

    states: tuple[_State, ...]  # by stage
    weights: float
    copies: float
    gradients: float
    optimizer: float
    update: float
    summed: float
    shards: int
    private: bool


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
    local: frozenset[int]  # stages whose received values are tensors of another stage of the device
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
        self._known_segments: dict[tuple[int, Share], Segments] = {}
        # The plans of a search have many devices and stages in common.
        self._peaks = lru_cache(_KEPT // 4)(lambda *key: list[float]())
        self._alone = lru_cache(_KEPT // 4)(lambda *key: dict[StagePlan, dict[int, float]]())
        self._weights = lru_cache(_KEPT)(self._make_weights)
        self._stage = lru_cache(_KEPT)(self._make_stage)
        self._runs = lru_cache(_KEPT)(self._make_runs)
        self._state = lru_cache(_KEPT)(self._make_state)

    @property
    def counted(self) -> int:
        """The number of runs of operations whose tensors were counted, each once for all stages that have it."""
        return sum(segments.counted for segments in self._known_segments.values())

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
        shape = shape_of(plan)
        needs = self._device(plan, shape, device, dict(enumerate(plan.stages)))
        return float(needs.totals(self._moments(plan, shape, device)).max())

    def at_least(self, plan: Plan, device: int, kept_from: Mapping[int, np.ndarray]) -> np.ndarray | None:
        """[variants]: lower bounds of the peak bytes of ``device`` where its stages keep other parts of themselves.

        ``kept_from`` has, for each stage of the device, the position in each variant from which it keeps its
        operations until its end. None if there is no bound for the model or the plan. It takes a fraction of the time
        of an estimate, since it counts only what a micro-batch in flight and its recomputation surely hold.
        """
        shape, (numbers, follow) = shape_of(plan), _stages(shape_of(plan))[device]
        stages = {number: replace(plan.stages[number], kept=()) for number in numbers}
        one_span = all(len(stage.operations) == 1 for stage in stages.values())
        if self._training.system is not None or not self._training.recompute_ends or not one_span:
            return None
        moments, needs = self._moments(plan, shape, device), self._device(plan, shape, device, stages)
        per_count = needs.per_count.reshape(-1, len(COUNTS)).copy()
        per_count[:, COUNTS.index("recomputed")] = per_count[:, COUNTS.index("sent")] = 0
        for row, number in enumerate(numbers):
            if number in follow:  # its input may be a tensor of the stage before
                per_count[row, 0] -= needs.stages[number].received
        quiet = sum(needs.constant.values()) + moments.counts @ per_count.ravel()
        least = np.repeat(quiet[:, None], len(kept_from[numbers[0]]), axis=1)
        for row, number in enumerate(numbers):
            saved, rest = self._saved(plan, stages[number], kept_from[number])
            in_flight, recomputed = moments.counts[:, row * len(COUNTS) : row * len(COUNTS) + 2].T
            again = np.array([key[0] in _RECOMPUTING and key[1] == number and not key[2] for key in moments.keys])
            least += in_flight[:, None] * saved + recomputed[:, None] * rest
            if number in shape.recompute:  # the operations that were kept are over when the others run again
                least += again[:, None] * np.maximum(0.0, rest - saved)
        return least.max(axis=0)

    def _saved(self, plan: Plan, stage: StagePlan, kept_from: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """At least the bytes of a micro-batch that ``stage`` keeps, and that it makes again, in each variant."""
        shares = shares_of(plan)
        samples, divisor = self._work.slice_of(self._samples(plan), stage.replicas)
        saved = np.zeros(len(kept_from))
        every = 0.0
        for share in shares:
            segments = self._segments(samples, share)
            (span,) = local_spans(segments.tensors, stage.operations)
            places = kept_from if segments.tensors.begins is None else segments.tensors.begins[kept_from]
            found = segments.saved_from(span) / divisor / len(shares)
            saved += found[places - span[0]]
            every += float(found[0])
        return saved, every - saved

    def of_stage(self, plan: Plan, number: int, stage: StagePlan) -> dict[int, float]:
        """Pipeline device -> peak bytes of ``stage`` alone, for each device that holds stage ``number`` of ``plan``.

        A device with one stage needs exactly these bytes. A device with several needs at most the sum of theirs.
        """
        shape = shape_of(plan)
        known = self._alone(shape, number, *self._degrees(plan))
        if stage not in known:
            known[stage] = {
                device: float(
                    self._device(plan, shape, device, {number: stage}).totals(self._moments(plan, shape, device)).max()
                )
                for device in dict.fromkeys(shape.homes[number])
            }
        return known[stage]

    def beside_activations(self, plan: Plan) -> tuple[float, ...]:
        """Per pipeline device, the peak of the bytes that are no activations: what ``of`` counts, at the operation
        that needs most of them. What a backward recomputes inside itself is an activation."""
        shape, stages = shape_of(plan), dict(enumerate(plan.stages))
        found = []
        for device in range(shape.devices):
            moments = self._moments(plan, shape, device)
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
        return self._stage(self._samples(plan), plan.stages[number], shares_of(plan), recompute, split)

    def devices(self, plan: Plan) -> tuple[DeviceMemory, ...]:
        """The peak of each pipeline device with its witness."""
        shape, stages = shape_of(plan), dict(enumerate(plan.stages))
        found = []
        for device in range(shape.devices):
            moments = self._moments(plan, shape, device)
            needs = self._device(plan, shape, device, stages)
            found.append(self._witness(plan, needs, moments, stages))
        return tuple(found)

    def largest(self, plan: Plan, device: int, count: int | None = 10) -> tuple[HeldTensor, ...]:
        """The ``count`` largest tensors of ``device`` at its peak, largest first; None: all.

        The tensors of each entry of the witness add up to it.
        """
        shape, stages = shape_of(plan), dict(enumerate(plan.stages))
        needs, moments = self._device(plan, shape, device, stages), self._moments(plan, shape, device)
        moment = moments.moments[int(needs.totals(moments).argmax())]
        reserve = needs.constant["reserve"]
        found = [HeldTensor(name="context and libraries", kind="reserve", bytes=reserve, count=1)]
        per_count = needs.per_count.reshape(-1, len(COUNTS))
        held_by: dict[int, dict[str, int]] = {}
        for place, number in enumerate(stages_of(shape, device)):
            held = dict(zip(COUNTS, moment.counts[place * len(COUNTS) :], strict=False))
            held_by[number] = held
            found += self._activations(plan, shape, number, needs, held)
            for name, size in zip(COUNTS[_FIRST_MESSAGE:], per_count[place, _FIRST_MESSAGE:].tolist(), strict=True):
                found.append(HeldTensor(name=_MESSAGES[name], kind="messages", bytes=size, count=held[name]))
        found += self._held_state(plan, shape, needs, held_by)
        if moment.summing:
            found.append(HeldTensor(name="sums of gradients", kind="messages", bytes=needs.summed, count=1))
        working = needs.peak_of(moment.key)
        name = self._operation(plan, working.position) or "the update"
        found.append(HeldTensor(name=name, kind="working", bytes=working.size, count=1))
        counts: dict[tuple[str, str, float], float] = {}
        for each in found:
            if each.total:
                key = each.name, each.kind, each.bytes
                counts[key] = counts.get(key, 0) + each.count
        listed = [HeldTensor(name=key[0], kind=key[1], bytes=key[2], count=many) for key, many in counts.items()]
        return tuple(sorted(listed, key=lambda each: each.total, reverse=True)[:count])

    def over_time(self, plan: Plan, timeline: Timeline, devices: Sequence[int]) -> list[BytesOverTime]:
        """The bytes that each of ``devices`` holds over ``timeline``, a simulation of the schedule of ``plan``.

        From the start of an operation to its end it holds the bytes of the operation's peak; then, until the next
        operation, the bytes that the next operation finds, without its temporaries. The largest value is the result of
        ``of``.
        """
        shape, stages = shape_of(plan), dict(enumerate(plan.stages))
        every = all_moments(timeline.schedule, read_once=self._reads_once(plan, shape))
        return [
            self._over_time(self._device(plan, shape, device, stages), _Moments(every[device]), device, timeline)
            for device in devices
        ]

    def _over_time(self, needs: _Device, moments: _Moments, device: int, timeline: Timeline) -> BytesOverTime:
        first = timeline.work.numbered.bounds[device]
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
        inputs = sum(
            count * (one.inputs - (one.received if number in needs.local else 0.0))
            for count, (number, one) in zip(in_flight, needs.stages.items(), strict=True)
        )
        entries["inputs"] += inputs
        entries["activations"] += held["in_flight"] - inputs
        entries["activations"] += held["recomputed"] + held["deferred"] + held["slice_gradients"]
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
        tensors = self._work.work_at(self._samples(plan), share_of(plan)).tensors
        in_whole = self._training.system is not None or len(shares_of(plan)) > 1
        if in_whole and tensors.begins is not None:
            position = int(tensors.begins[position])  # a fused stage and slices have the whole Graph's positions
        return tensors.operations[position] if position < len(tensors.operations) else ""

    def _activations(
        self, plan: Plan, shape: Shape, number: int, needs: _Device, held: Mapping[str, int]
    ) -> Iterator[HeldTensor]:
        """What stage ``number`` holds for the micro-batches that ``held`` counts."""
        stage, shares = plan.stages[number], shares_of(plan)
        samples, divisor = self._work.slice_of(self._samples(plan), stage.replicas)
        dropped = self._dropped(samples, stage, recompute=number in shape.recompute)
        found: list[StageTensor] = []
        for share in shares:
            tables = self._work.tables(samples, share)
            if self._training.system is not None:
                blockwise = not self._training.recompute_ends
                found += fused_stage_tensors(tables, stage.operations, dropped, blockwise=blockwise)
                continue
            tensors, block = tables.work.tensors, self._block(tables, dropped)
            spans = local_spans(tensors, stage.operations), local_spans(tensors, dropped)
            found += stage_tensors(self._segments(samples, share), *spans, split=number in shape.split, block=block)
            if block is not None:
                size = _block_inputs(tables, dropped, needs.stages[number].received * divisor)
                name = "inputs of recomputed blocks"
                found.append(StageTensor(count="in_flight", kind="inputs", name=name, bytes=size))
        for each in found:
            if not (each.is_received and number in needs.local):
                size, count = each.bytes / divisor, held[each.count] / len(shares)
                yield HeldTensor(name=each.name, kind=each.kind, bytes=size, count=count)

    def _held_state(
        self, plan: Plan, shape: Shape, needs: _Device, held: Mapping[int, Mapping[str, int]]
    ) -> Iterator[HeldTensor]:
        """The parameters of the stages in ``held``, with their copies, gradients and optimizer state, and buffers."""
        training, samples, share = self._training, self._samples(plan), share_of(plan)
        unmade = frozenset[int]()
        for number, counts in held.items():
            stage = plan.stages[number]
            fixed = self._state(samples, stage.operations, stage.replicas, shares_of(plan)).fixed
            name = "frozen weights, buffers and constants"
            yield HeldTensor(name=name, kind="weights", bytes=fixed, count=1)
            size, _ = self._work.slice_of(samples, stage.replicas)
            tables = self._work.tables(size, share)
            for one in parameters_of(tables, stage.operations):
                older = one.elements * training.weight_bytes + one.low
                yield HeldTensor(name=one.name, kind="copies", bytes=one.low, count=1)
                yield HeldTensor(name=one.name, kind="versions", bytes=older, count=counts["older"])
            if needs.private and needs.stages[number].private and not counts["gradients"]:
                spans = stage.operations, self._dropped(size, stage, recompute=number in shape.recompute)
                segments = self._segments(size, share)
                unmade |= private_parameters(segments, *(local_spans(segments.tensors, each) for each in spans))
        stages = [plan.stages[number] for number in held]
        here = tuple(span for stage in stages for span in stage.operations)
        size, _ = self._work.slice_of(samples, stages[0].replicas)
        for one in parameters_of(self._work.tables(size, share), here):
            gradient = self._gradient_bytes * one.elements - (one.gradient if one.number in unmade else 0.0)
            moments = training.moments * one.elements
            if training.state_elements is not None:
                moments = training.state_elements(one.name, one.shape)
            state = 4 * moments + training.master_bytes * one.elements
            weight = training.weight_bytes * one.elements
            yield HeldTensor(name=one.name, kind="weights", bytes=weight, count=1)
            yield HeldTensor(name=one.name, kind="gradients", bytes=gradient, count=1)
            yield HeldTensor(name=one.name, kind="optimizer", bytes=state, count=1 / needs.shards)

    @property
    def _gradient_bytes(self) -> float:
        """Bytes per parameter of its gradient and of the system's further copies of it."""
        system = self._training.system
        return self._training.sync_bytes + (system.gradient_copies if system else 0.0)

    def _segments(self, samples: int, share: Share) -> Segments:
        if (samples, share) not in self._known_segments:
            self._known_segments[samples, share] = Segments(self._work.tables(samples, share).work.tensors)
        return self._known_segments[samples, share]

    def _degrees(self, plan: Plan) -> tuple:
        """What decides the memory of stages of ``plan`` beside the stages and its shape."""
        return self._samples(plan), share_of(plan), shares_of(plan), plan.dp, plan.shard_optimizer

    def _reads_once(self, plan: Plan, shape: Shape) -> bool:
        return self._training.read_once and has_one_reader(plan, shape)

    def _inputs_for_others(
        self, plan: Plan, shape: Shape, here: Mapping[int, tuple[Span, ...]]
    ) -> dict[int, tuple[float, float]]:
        """What stage 0 reads for others, of each stage of a device, of operations ``here``: bytes of one message to it,
        and bytes that stage 0 sends to other devices; both without inputs that stage 0 needs and holds itself."""
        if not self._reads_once(plan, shape):
            return dict.fromkeys(here, (0.0, 0.0))
        tables = self._work.tables(self._samples(plan), share_of(plan))
        if 0 not in here:
            return {number: (tables.inputs(operations), 0.0) for number, operations in here.items()}
        own = here[0]
        elsewhere = without(((0, len(tables.work)),), sorted(span for each in here.values() for span in each))
        of_others = {number: (tables.inputs(operations, own), 0.0) for number, operations in here.items()}
        return of_others | {0: (0.0, tables.inputs(elsewhere, own))}

    def _moments(self, plan: Plan, shape: Shape, device: int) -> _Moments:
        return _highest(shape, device, self._reads_once(plan, shape))

    def _samples(self, plan: Plan) -> int:
        return plan.micro_batch_size // shape_of(plan).sample_parts

    def _device(self, plan: Plan, shape: Shape, device: int, stages: Mapping[int, StagePlan]) -> _Device:
        """What ``device`` needs for its stages, as far as they are in ``stages``, a dict from number to stage."""
        training, samples = self._training, self._samples(plan)
        numbers, follow = _stages(shape)[device]
        here = [number for number in numbers if number in stages]
        shares = shares_of(plan)
        found = {
            number: self._stage(samples, stages[number], shares, number in shape.recompute, number in shape.split)
            for number in here
        }
        held = self._weights(
            samples,
            share_of(plan),
            shares,
            tuple((stages[number].operations, stages[number].replicas) for number in here),
            max(len(set(shape.homes[number])) * plan.dp * stages[number].replicas for number in here),
            plan.shard_optimizer,
            shape.asynchronous,
        )
        gradients = held.gradients - (sum(each.private for each in found.values()) if held.private else 0.0)
        constant = {
            "reserve": training.reserve_bytes,
            "weights": held.weights,
            "copies": held.copies,
            "gradients": max(0.0, gradients),
            "optimizer": held.optimizer,
        }
        # What a stage of the same device sends is the same tensor on both sides.
        local = {number for number in follow if number in found and number - 1 in found}
        local = {number for number in local if found[number - 1].sent_beside == 0}
        states, per_count = iter(held.states), list[tuple[float, ...]]()
        inputs = self._inputs_for_others(plan, shape, {number: stages[number].operations for number in here})
        for number in numbers:
            if number not in stages:
                per_count.append((0.0,) * len(COUNTS))
                continue
            one, state = found[number], next(states)
            per_count.append(
                (
                    one.in_flight - (one.received if number in local else 0.0),
                    one.recomputed,
                    one.deferred,
                    one.slice_gradient,
                    one.private if held.private else 0.0,
                    state.elements * training.weight_bytes + state.copies,
                    one.received,
                    one.sent_gradient,
                    one.sent_beside,
                    one.received_gradient,
                    *inputs[number],
                )
            )
        return _Device(
            constant=constant,
            stages=found,
            per_count=np.array(per_count).ravel(),
            update=held.update,
            summed=held.summed,
            private=held.private,
            local=frozenset(local),
            split=shape.split,
            shards=held.shards,
        )

    def _make_weights(
        self,
        samples: int,
        share: Share,
        shares: tuple[Share, ...],
        stages: tuple[tuple[tuple[Span, ...], int], ...],
        holders: int,
        shard_optimizer: bool,
        asynchronous: bool,
    ) -> _Weights:
        """The weights of a device with ``stages``, (operations, replicas) of each; as many as ``holders`` ranks hold
        the weights of a stage."""
        training = self._training
        states = [self._state(samples, operations, replicas, shares) for operations, replicas in stages]
        every, replicas = tuple(span for operations, _ in stages for span in operations), stages[0][1]
        elements = self._work.tables(self._work.slice_of(samples, replicas)[0], share).parameters(every)
        shards = holders if shard_optimizer else 1
        own = sum(each.elements for each in states)
        once = elements / own if own else 1.0  # parameters that several stages of the device share count once
        moments = once * sum(each.optimizer for each in states)
        if training.state_elements is not None and own != elements:  # they depend on shapes
            moments = self._state(samples, every, replicas, shares).optimizer
        update = max((each.update for each in states), default=0.0)
        if shards > 1:
            update = training.update_copies[0] * elements * training.sync_bytes / shards
        summed = training.sums_have_copies and shards > 1
        return _Weights(
            states=tuple(states),
            weights=elements * training.weight_bytes + sum(each.fixed for each in states),
            copies=sum(each.copies for each in states),
            gradients=elements * self._gradient_bytes,
            optimizer=(moments + training.master_bytes * elements) / shards,
            update=update,
            summed=elements * training.sync_bytes * (shards - 1) / shards if summed else 0.0,
            shards=shards,
            private=training.backward_makes_gradients and holders == 1 and not asynchronous,
        )

    def _dropped(self, samples: int, stage: StagePlan, *, recompute: bool) -> tuple[tuple[int, int], ...]:
        """The operations of ``stage`` that are recomputed, if it recomputes, at ``samples`` of a look-up."""
        return without(stage.operations, self._work.kept(samples, stage)) if recompute else ()

    def _block(self, tables: WorkTables, dropped: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """The last of the recomputed blocks, as positions of a rank, where each block is recomputed by itself."""
        if not dropped or self._training.recompute_ends:
            return None
        block = tables.last_block(dropped)
        return None if block is None else local_spans(tables.work.tensors, (block,))[0]

    def _make_stage(
        self, samples: int, stage: StagePlan, shares: tuple[Share, ...], recompute: bool, split: bool
    ) -> StageMemory:
        """The memory of ``stage`` for a micro-batch or, if it has several ``shares``, for the mean of them."""
        found = [self._stage_of_share(samples, stage, share, recompute, split) for share in shares]
        if len(shares) == 1:
            return found[0]
        if self._training.system is None:
            every = (self._work.tables(samples, share).work.tensors for share in shares)
            found = [one.moved(tensors.whole_position) for one, tensors in zip(found, every, strict=True)]
        return mean_of_slices(found)

    def _stage_of_share(
        self, samples: int, stage: StagePlan, share: Share, recompute: bool, split: bool
    ) -> StageMemory:
        samples, divisor = self._work.slice_of(samples, stage.replicas)
        tables = self._work.tables(samples, share)
        dropped = self._dropped(samples, stage, recompute=recompute)
        if self._training.system is not None:
            blockwise = not self._training.recompute_ends
            return fused_stage_memory(tables, stage.operations, dropped, blockwise=blockwise).divided(divisor)
        segments, block = self._segments(samples, share), self._block(tables, dropped)
        operations, dropped_here = (local_spans(segments.tensors, each) for each in (stage.operations, dropped))
        by = 0
        if (repeat := segments.repeat_of(operations)) is not None:
            by = repeat[0].period * repeat[1]
        first_block = None if block is None else (block[0] - by, block[1] - by)
        runs = earlier(operations, by), earlier(dropped_here, by), split, first_block
        found = self._runs(samples, share, *runs)
        if by:
            found = found.moved(lambda position: position + by)
        if block is not None:
            inputs = _block_inputs(tables, dropped, found.received)
            found = replace(found, in_flight=found.in_flight + inputs, inputs=found.inputs + inputs)
        return found.divided(divisor)

    def _make_runs(
        self,
        samples: int,
        share: Share,
        operations: tuple[Span, ...],
        dropped: tuple[Span, ...],
        split: bool,
        block: Span | None,
    ) -> StageMemory:
        """The memory of a stage of these operations of a rank, at ``samples`` of a look-up."""
        return stage_memory(self._segments(samples, share), operations, dropped, split=split, block=block)

    def _make_state(
        self, samples: int, operations: tuple[Span, ...], replicas: int, shares: tuple[Share, ...]
    ) -> _State:
        """The state of a stage, whose ``shares`` have the same; each holds what it computes once, such as masks."""
        samples, _ = self._work.slice_of(samples, replicas)
        tables, *others = (self._work.tables(samples, share) for share in shares)
        tensors = tables.work.tensors
        used: dict[int, None] = {}
        for first, last in local_spans(tensors, operations):
            inside = slice(*np.searchsorted(tensors.state_at, (first, last)))
            used |= dict.fromkeys(tensors.state_of[inside].tolist())
        numbers = np.array(list(used), dtype=int)
        elements = tables.parameters(operations)
        optimizer = 4 * self._training.moments * elements
        if (state_elements := self._training.state_elements) is not None:
            optimizer = float(sum(4 * state_elements(tensors.parameters[n], tensors.shapes[n]) for n in used))
        copies = float(tensors.low_gradient[numbers].sum())
        of_this, of_the_last = self._training.update_copies
        sizes = [0.0, *tensors.gradient[numbers].tolist(), 0.0]
        return _State(
            elements=elements,
            optimizer=optimizer,
            fixed=max(0.0, tables.fixed(operations) - copies) + sum(each.held_once(operations) for each in others),
            copies=copies,
            update=max(of_this * size + of_the_last * before for before, size in pairwise(sizes)),
        )


def _block_inputs(tables: WorkTables, dropped: Sequence[tuple[int, int]], received: float) -> float:
    """Bytes of the inputs of recomputed blocks beside the ``received`` bytes, which are the input of the first
    block."""
    return max(0.0, tables.block_inputs(dropped) - received)
