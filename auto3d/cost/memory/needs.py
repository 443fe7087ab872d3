"""What a pipeline device needs at each moment of its schedule: bytes per count of a moment, and peaks of operations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import numpy as np

from auto3d.cost.memory.segment import Peak
from auto3d.cost.memory.stage import StageMemory
from auto3d.cost.memory.weights import DeviceWeights
from auto3d.schedule.moments import COLUMN, Counts, Key, Moment, highest_moments
from auto3d.schedule.operation import Kind
from auto3d.schedule.shape import Shape

RECOMPUTING = (Kind.BACKWARD, Kind.BACKWARD_INPUT)  # unless a recomputation of its own came before
_ACTIVATIONS = [COLUMN.in_flight, COLUMN.recomputed, COLUMN.deferred, COLUMN.slice_gradients]


class MomentCounts:
    """Moments of one device as a matrix of counts: a row for each, and all Counts of its stages one after the other."""

    def __init__(self, moments: Sequence[Moment]) -> None:
        self.moments = moments
        self.keys = [moment.key for moment in moments]
        self.counts = np.array([[*chain.from_iterable(moment.counts)] for moment in moments], dtype=float)
        self.distinct = list(dict.fromkeys(self.keys))
        self.key_of = np.array([self.distinct.index(key) for key in self.keys])

    def of_stage(self, place: int) -> Counts[np.ndarray]:
        """[moments]: the counts of the stage at ``place``, which are among the device's."""
        return Counts(*self.counts[:, place * len(COLUMN) : (place + 1) * len(COLUMN)].T)


@lru_cache(2**14)
def highest_counts(shape: Shape, device: int, read_once: bool) -> MomentCounts:
    return MomentCounts(highest_moments(shape, device, read_once=read_once))


@dataclass(frozen=True, kw_only=True)
class DeviceNeeds:
    """What a device needs for some of its stages, with the moments at which it may need most."""

    moments: MomentCounts
    constant: dict[str, float]  # entry of DeviceMemory -> bytes that it holds all the time
    stages: dict[int, StageMemory]
    per_count: np.ndarray  # [stages × counts], bytes
    weights: DeviceWeights
    local: frozenset[int]  # stages whose received values are tensors of another stage of the device
    split: frozenset[int]  # stages with weight halves; a B of such a stage runs both, one after the other

    @property
    def idle(self) -> float:
        return sum(self.constant.values())

    def peak_of(self, key: Key) -> Peak:
        """What the operation of a moment with this key needs beyond what the device holds."""
        kind, stage, recomputed, makes_gradients, _ = key
        if kind is Kind.UPDATE:
            return Peak(size=self.weights.update, position=-1)
        memory = self.stages.get(stage)
        if memory is None or kind is Kind.SYNC:
            return Peak(size=0.0, position=-1)
        if kind is Kind.FORWARD:
            return memory.forward
        if kind is Kind.RECOMPUTE:
            return memory.recompute
        makes_gradients &= self.weights.private
        half = memory.weight_half.size + (memory.private if makes_gradients else 0.0)
        if kind is Kind.BACKWARD_WEIGHT:
            return replace(memory.weight_half, size=half)
        peak = memory.first_backward if makes_gradients else memory.backward
        if recomputed:
            peak = memory.after_recompute
        if kind is Kind.BACKWARD and stage in self.split:
            half = half + memory.deferred - (memory.in_flight + (memory.recomputed if recomputed else 0.0))
            if half > peak.size:
                return replace(memory.weight_half, size=half)
        return peak

    def quiet(self) -> np.ndarray:
        """[moments]: bytes without the needs of the operations that run."""
        return self.idle + self.moments.counts @ self.per_count.ravel()

    def totals(self) -> np.ndarray:
        """[moments]: bytes."""
        peaks = np.array([self.peak_of(key).size + self.weights.summed * key[4] for key in self.moments.distinct])
        return self.quiet() + peaks[self.moments.key_of]

    def activations(self) -> np.ndarray:
        """[moments]: bytes of activations, also of those that a backward recomputes inside itself."""
        per_count = np.zeros_like(self.per_count)
        per_count[:, _ACTIVATIONS] = self.per_count[:, _ACTIVATIONS]
        inside = [
            self.stages[stage].recomputed if kind in RECOMPUTING and not recomputed else 0.0
            for kind, stage, recomputed, _, _ in self.moments.keys
        ]
        return self.moments.counts @ per_count.ravel() + np.array(inside)
