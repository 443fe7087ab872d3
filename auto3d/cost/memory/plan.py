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
from auto3d.cost.memory.segment import Peak
from auto3d.cost.memory.stage import StageMemory, mean_of_slices, private_parameters, stage_memory
from auto3d.cost.memory.stage_tensors import StageTensor, fused_stage_tensors, stage_tensors
from auto3d.cost.model_work import ModelWork
from auto3d.cost.share import Share, share_of, shares_of
from auto3d.cost.tables import WorkTables, without
from auto3d.cost.training_options import TrainingOptions
from auto3d.plan import Plan, StagePlan
from auto3d.schedule.moments import COUNTS, Key, Moment, all_moments, highest_moments, stages_of
from auto3d.schedule.operation import Kind
from auto3d.schedule.shape import Shape, shape_of
from auto3d.simulate.memory_timeline import BytesOverTime
from auto3d.simulate.simulate import Timeline

_NONE = Peak(size=0.0, position=-1)
_ACTIVATIONS = COUNTS[:4]  # in flight, recomputed, deferred, gradients of slices
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
        return self._stage(self._samples(plan), plan.stages[number], shares_of(plan), recompute, split)

    def devices(self, plan: Plan) -> tuple[DeviceMemory, ...]:
        """The peak of each pipeline device with its witness."""
        shape, stages = shape_of(plan), dict(enumerate(plan.stages))
        found = []
        for device, moments in enumerate(_highest(shape)):
            needs = self._device(plan, shape, device, stages)
            found.append(self._witness(plan, needs, moments, stages))
        return tuple(found)

    def largest(self, plan: Plan, device: int, count: int | None = 10) -> tuple[HeldTensor, ...]:
        """The ``count`` largest tensors of ``device`` at its peak, largest first; None: all.

        The tensors of each entry of the witness add up to it.
        """
        shape, stages = shape_of(plan), dict(enumerate(plan.stages))
        needs, moments = self._device(plan, shape, device, stages), _highest(shape)[device]
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
        if self._training.system is not None and tensors.begins is not None:
            position = int(tensors.begins[position])  # the positions of a fused stage are the whole Graph's
        return tensors.operations[position] if position < len(tensors.operations) else ""

    def _activations(
        self, plan: Plan, shape: Shape, number: int, needs: _Device, held: Mapping[str, int]
    ) -> Iterator[HeldTensor]:
        """What stage ``number`` holds for the micro-batches that ``held`` counts."""
        stage, shares = plan.stages[number], shares_of(plan)
        samples, divisor = self._work.slice_of(self._samples(plan), stage.replicas)
        dropped = self._dropped(samples, stage, recompute=number in shape.recompute)
        found: list[StageTensor] = []
        for tables in (self._work.tables(samples, share) for share in shares):
            if self._training.system is not None:
                blockwise = not self._training.recompute_ends
                found += fused_stage_tensors(tables, stage.operations, dropped, blockwise=blockwise)
                continue
            tensors, block = tables.work.tensors, self._block(tables, dropped)
            spans = local_spans(tensors, stage.operations), local_spans(tensors, dropped)
            found += stage_tensors(tensors, *spans, split=number in shape.split, block=block)
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
            fixed = self._state(samples, stage, shares_of(plan)).fixed
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
                unmade |= private_parameters(tables.work.tensors, *(local_spans(tables.work.tensors, s) for s in spans))
        stages = [plan.stages[number] for number in held]
        here = tuple(span for stage in stages for span in stage.operations)
        size, _ = self._work.slice_of(samples, stages[0].replicas)
        for one in parameters_of(self._work.tables(size, share), here):
            gradient = self._gradient_bytes * one.elements - (one.gradient if one.number in unmade else 0.0)
            moments = training.moments * one.elements
            if training.state_elements is not None:
                moments = training.state_elements(one.shape)
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

    def _samples(self, plan: Plan) -> int:
        return plan.micro_batch_size // shape_of(plan).sample_parts

    def _device(self, plan: Plan, shape: Shape, device: int, stages: Mapping[int, StagePlan]) -> _Device:
        """What ``device`` needs for those of its stages that are in ``stages``, a dict from number to stage."""
        training, samples = self._training, self._samples(plan)
        numbers = stages_of(shape, device)
        here = [number for number in numbers if number in stages]
        share, shares = share_of(plan), shares_of(plan)
        found = {
            number: self._stage(samples, stages[number], shares, number in shape.recompute, number in shape.split)
            for number in here
        }
        state = {number: self._state(samples, stages[number], shares) for number in here}
        tables = self._work.tables(self._work.slice_of(samples, stages[here[0]].replicas)[0], share)
        elements = tables.parameters(tuple(span for number in here for span in stages[number].operations))
        holders = [len(set(shape.homes[number])) * plan.dp * stages[number].replicas for number in here]
        shards = max(holders) if plan.shard_optimizer else 1
        own = sum(each.elements for each in state.values())
        once = elements / own if own else 1.0  # parameters that several stages of the device share count once
        gradients = elements * self._gradient_bytes
        private = training.backward_makes_gradients and max(holders) == 1 and not shape.asynchronous
        if private:
            gradients -= sum(each.private for each in found.values())
        moments = once * sum(each.optimizer for each in state.values())
        if training.state_elements is not None and own != elements:  # they depend on shapes
            spans = tuple(span for number in here for span in stages[number].operations)
            moments = self._state(samples, replace(stages[here[0]], operations=spans, kept=()), shares).optimizer
        constant = {
            "reserve": training.reserve_bytes,
            "weights": elements * training.weight_bytes + sum(each.fixed for each in state.values()),
            "copies": sum(each.copies for each in state.values()),
            "gradients": max(0.0, gradients),
            "optimizer": (moments + training.master_bytes * elements) / shards,
        }
        per_count = np.zeros((len(numbers), len(COUNTS)))
        local: set[int] = set()
        for row, number in enumerate(numbers):
            if number not in stages:
                continue
            one, kept = found[number], state[number]
            neighbours = any(
                shape.device_of.get((number - 1, pipe)) == device == shape.device_of[number, pipe]
                for pipe in range(shape.pipes)
            )
            # What a stage of the same device sends is the same tensor on both sides.
            if neighbours and (number - 1) in found and found[number - 1].sent_beside == 0:
                local.add(number)
            per_count[row] = (
                one.in_flight - (one.received if number in local else 0.0),
                one.recomputed,
                one.deferred,
                one.slice_gradient,
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
            local=frozenset(local),
            split=shape.split,
            shards=shards,
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
        tensors, block = tables.work.tensors, self._block(tables, dropped)
        spans = local_spans(tensors, stage.operations), local_spans(tensors, dropped)
        found = stage_memory(tensors, *spans, split=split, block=block)
        if block is not None:
            inputs = _block_inputs(tables, dropped, found.received)
            found = replace(found, in_flight=found.in_flight + inputs, inputs=found.inputs + inputs)
        return found.divided(divisor)

    def _make_state(self, samples: int, stage: StagePlan, shares: tuple[Share, ...]) -> _State:
        """The state of ``stage``, whose ``shares`` have the same; each holds what it computes once, such as masks."""
        samples, _ = self._work.slice_of(samples, stage.replicas)
        tables, *others = (self._work.tables(samples, share) for share in shares)
        tensors = tables.work.tensors
        used: dict[int, None] = {}
        for first, last in local_spans(tensors, stage.operations):
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
            fixed=max(0.0, tables.fixed(stage.operations) - copies)
            + sum(each.held_once(stage.operations) for each in others),
            copies=copies,
            update=max(of_this * size + of_the_last * before for before, size in pairwise(sizes)),
        )


def _block_inputs(tables: WorkTables, dropped: Sequence[tuple[int, int]], received: float) -> float:
    """Bytes of the inputs of recomputed blocks beside the ``received`` bytes, which are that of the first."""
    return max(0.0, tables.block_inputs(dropped) - received)
