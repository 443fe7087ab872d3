"""What the weights of a device's stages take: parameters, their copies and gradients, and the optimizer's state."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from auto3d.cost.memory.device import HeldTensor
from auto3d.cost.memory.stage_bytes import KEPT, StageRun
from auto3d.cost.model_work import ModelWork
from auto3d.cost.parameters import local_spans, parameters_in, parameters_of
from auto3d.cost.tensors import Span
from auto3d.cost.training_options import TrainingOptions
from auto3d.share import Share


@dataclass(frozen=True, kw_only=True)
class StageState:
    """Bytes of the state of one stage that do not depend on micro-batches, and elements of its trained parameters."""

    elements: float
    optimizer: float
    fixed: float  # buffers and constants
    copies: float  # copies of one version of the weights in low precision
    update: float  # temporaries of the update of its parameters


@dataclass(frozen=True, kw_only=True)
class DeviceWeights:
    """What the weights of the stages of one device take, whatever they recompute."""

    versions: tuple[float, ...]  # one version of the weights of each stage, with copies in low precision
    constant: dict[str, float]  # weights, copies, gradients and optimizer, as in DeviceMemory: bytes
    update: float
    summed: float  # gradients of other ranks, from the first sum until the update
    shards: int  # ranks that share the state of the optimizer
    private: bool  # whether backwards make the gradients of private parameters


class WeightBytes:
    """The weights of a model's stages; ``gradient_copies`` are bytes per parameter beside its gradient."""

    def __init__(self, work: ModelWork, training: TrainingOptions, gradient_copies: float) -> None:
        self._work, self._training = work, training
        self._gradient_bytes = training.sync_bytes + gradient_copies
        self.of = lru_cache(KEPT)(self._count)
        self._state = lru_cache(KEPT)(self._count_state)

    def _count(
        self,
        samples: int,
        share: Share,
        shares: tuple[Share, ...],
        stages: tuple[tuple[tuple[Span, ...], int], ...],
        holders: int,
        sum_is_split: bool,
        asynchronous: bool,
    ) -> DeviceWeights:
        """The weights of a device with ``stages``, (operations, replicas) of each stage; as many as ``holders`` ranks
        hold the weights of a stage, among which the sum of the gradients, and so the optimizer's state, may be
        split."""
        training = self._training
        states = [self._state(samples, operations, replicas, shares) for operations, replicas in stages]
        every, replicas = tuple(span for operations, _ in stages for span in operations), stages[0][1]
        elements = self._work.tables(self._work.slice_of(samples, replicas)[0], share).parameters(every)
        shards = holders if sum_is_split else 1
        own = sum(state.elements for state in states)
        once = elements / own if own else 1.0  # parameters that several stages of the device share count once
        moments = once * sum(state.optimizer for state in states)
        if training.state_elements is not None and own != elements:  # they depend on shapes
            moments = self._state(samples, every, replicas, shares).optimizer
        update = max((state.update for state in states), default=0.0)
        if shards > 1:
            update = training.update_copies[0] * elements * training.sync_bytes / shards
        summed = training.sums_have_copies and shards > 1
        return DeviceWeights(
            versions=tuple(state.elements * training.weight_bytes + state.copies for state in states),
            constant={
                "weights": elements * training.weight_bytes + sum(state.fixed for state in states),
                "copies": sum(state.copies for state in states),
                "gradients": elements * self._gradient_bytes,
                "optimizer": (moments + training.master_bytes * elements) / shards,
            },
            update=update,
            summed=elements * training.sync_bytes * (shards - 1) / shards if summed else 0.0,
            shards=shards,
            private=training.backward_makes_gradients and holders == 1 and not asynchronous,
        )

    def _count_state(
        self, samples: int, operations: tuple[Span, ...], replicas: int, shares: tuple[Share, ...]
    ) -> StageState:
        """The state of a stage, the same for all ``shares``; each share holds what it computes once, such as masks."""
        samples, _ = self._work.slice_of(samples, replicas)
        tables, *others = (self._work.tables(samples, share) for share in shares)
        tensors = tables.work.tensors
        used = parameters_in(tensors, local_spans(tensors, operations))
        numbers = np.array(used, dtype=int)
        elements = tables.parameters(operations)
        optimizer = 4 * self._training.moments * elements
        if (state_elements := self._training.state_elements) is not None:
            optimizer = float(sum(4 * state_elements(tensors.parameters[n], tensors.shapes[n]) for n in used))
        copies = float(tensors.low_gradient[numbers].sum())
        of_this, of_the_last = self._training.update_copies
        sizes = [0.0, *tensors.gradient[numbers].tolist(), 0.0]
        return StageState(
            elements=elements,
            optimizer=optimizer,
            fixed=max(0.0, tables.fixed(operations) - copies) + sum(other.held_once(operations) for other in others),
            copies=copies,
            update=max(of_this * size + of_the_last * before for before, size in pairwise(sizes)),
        )

    def tensors(
        self, runs: Sequence[StageRun], share: Share, *, older: Sequence[int], unmade: frozenset[int], shards: int
    ) -> Iterator[HeldTensor]:
        """The weights of the stages of ``runs``, tensor by tensor. ``share`` is the share of their ranks in a
        micro-batch, ``older`` has the number of each stage's older versions, and ``unmade`` the parameters without
        gradients; ``shards`` ranks share the state of the optimizer."""
        training = self._training
        for (stage, samples, shares, *_), versions in zip(runs, older, strict=True):
            fixed = self._state(samples, stage.operations, stage.replicas, shares).fixed
            yield HeldTensor(name="frozen weights, buffers and constants", kind="weights", bytes=fixed, count=1)
            size, _ = self._work.slice_of(samples, stage.replicas)
            for weight in parameters_of(self._work.tables(size, share), stage.operations):
                version = weight.elements * training.weight_bytes + weight.low
                yield HeldTensor(name=weight.name, kind="copies", bytes=weight.low, count=1)
                yield HeldTensor(name=weight.name, kind="versions", bytes=version, count=versions)
        here = tuple(span for run in runs for span in run.stage.operations)
        size, _ = self._work.slice_of(runs[0].samples, runs[0].stage.replicas)
        for weight in parameters_of(self._work.tables(size, share), here):
            gradient = self._gradient_bytes * weight.elements - (weight.gradient if weight.number in unmade else 0.0)
            moments = training.moments * weight.elements
            if training.state_elements is not None:
                moments = training.state_elements(weight.name, weight.shape)
            state = 4 * moments + training.master_bytes * weight.elements
            yield HeldTensor(name=weight.name, kind="weights", bytes=training.weight_bytes * weight.elements, count=1)
            yield HeldTensor(name=weight.name, kind="gradients", bytes=gradient, count=1)
            yield HeldTensor(name=weight.name, kind="optimizer", bytes=state, count=1 / shards)
