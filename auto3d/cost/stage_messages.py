"""Bytes and seconds of the messages between stages."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from auto3d.cluster import Cluster
from auto3d.conversions import Collective
from auto3d.cost.model_work import ModelWork
from auto3d.cost.placed import PlacedTraffic, Route
from auto3d.cost.training_options import TrainingOptions
from auto3d.plan import Plan
from auto3d.schedule.shape import Shape, has_one_reader, shares_of
from auto3d.share import Share, share_of
from auto3d.simulate.costs import MessageCost


class StageMessages:
    """The messages between stages of ``work`` on ``cluster``."""

    def __init__(self, cluster: Cluster, work: ModelWork, training: TrainingOptions) -> None:
        self._cluster, self._work, self._training = cluster, work, training
        self._crossing = lru_cache(2**14)(self._find_crossing)  # the plans of a search have many cuts in common

    def cost(self, plan: Plan, shape: Shape, boundary: int, pipeline: int, traffic: PlacedTraffic) -> MessageCost:
        """The cost of the boundary between stages ``boundary`` and ``boundary`` + 1."""
        source, target = (shape.device_of[stage, 0] for stage in (boundary, boundary + 1))
        if source == target:
            return MessageCost()
        sent, gathered = self._crossing_bytes(plan, shape, boundary)
        routes = traffic.routes(source, target, pipeline)
        seconds = shape.parts * sent / _bandwidth(routes)
        if gathered:
            seconds += traffic.tensor[target, pipeline].seconds(Collective.ALL_GATHER, shape.parts * gathered)
        latency = max([route.link.latency_s for route in routes])
        inputs = self.input_bytes(plan, shape, 1) if boundary == 0 else 0.0
        forward = seconds + shape.parts * inputs / _bandwidth(routes) if inputs else seconds
        return MessageCost(latency=latency, forward=forward, backward=seconds)

    def input_bytes(self, plan: Plan, shape: Shape, stage: int) -> float:
        """Bytes of the inputs of a part of a micro-batch that stage 0 reads for ``stage``; 0: it reads none for it."""
        if stage == 0 or not self._training.read_once or not has_one_reader(plan, shape):
            return 0.0
        tables = self._work.tables(plan.micro_batch_size // shape.sample_parts, share_of(plan))
        return tables.inputs(plan.stages[stage].operations)

    def inputs_s(self, plan: Plan, shape: Shape, pipeline: int, traffic: PlacedTraffic) -> tuple[float, ...]:
        """Seconds of the messages of inputs from stage 0, as ``Costs.inputs`` has them."""
        sizes = [self.input_bytes(plan, shape, stage) for stage in range(shape.stages)]
        if not any(sizes[2:]):
            return ()
        seconds = [0.0, 0.0]
        for stage, size in enumerate(sizes[2:], 2):
            source, target = shape.device_of[0, 0], shape.device_of[stage, 0]
            if source == target or not size:
                seconds.append(0.0)
                continue
            routes = traffic.routes(source, target, pipeline)
            seconds.append(max(route.link.latency_s for route in routes) + size / _bandwidth(routes))
        return tuple(seconds)

    def input_handling_s(self, plan: Plan, shape: Shape, pipeline: int, traffic: PlacedTraffic) -> tuple[float, ...]:
        """Seconds of compute that the messages of ``inputs_s`` cost their receivers, per stage, and as many stage 0.

        Inputs of stage 1 count by their bytes alone: they come with its activations.
        """
        seconds = [0.0]
        for stage in range(1, shape.stages):
            size = self.input_bytes(plan, shape, stage)
            source, target = shape.device_of[0, 0], shape.device_of[stage, 0]
            nodes = {self._cluster.node_of[traffic.ranks(device, pipeline)[0]] for device in (source, target)}
            per_message, per_byte = self._cluster.nodes[min(nodes)].handling
            is_handled = size and source != target and len(nodes) == 1
            seconds.append(shape.parts * (per_message * (stage > 1) + size * per_byte) if is_handled else 0.0)
        return tuple(seconds)

    def handling_s(self, plan: Plan, shape: Shape, boundary: int, pipeline: int, traffic: PlacedTraffic) -> float:
        """Seconds of compute that one micro-batch's message costs its sender, and as many its receiver."""
        source, target = (shape.device_of[stage, 0] for stage in (boundary, boundary + 1))
        nodes = {self._cluster.node_of[traffic.ranks(device, pipeline)[0]] for device in (source, target)}
        if source == target or len(nodes) > 1:
            return 0.0
        per_message, per_byte = self._cluster.nodes[min(nodes)].handling
        replicas = min(plan.stages[number].replicas for number in (boundary, boundary + 1))
        return shape.parts * (per_message + self._crossing_bytes(plan, shape, boundary)[0] / replicas * per_byte)

    def _crossing_bytes(self, plan: Plan, shape: Shape, boundary: int) -> tuple[float, float]:
        """Bytes that one part of a micro-batch sends onward from stage ``boundary``, as ``crossing`` has them, and
        bytes that are gathered then, in the largest slice of a replica."""
        end = plan.stages[boundary].operations[-1][1]
        samples = plan.micro_batch_size // shape.sample_parts
        sent, gathered = self._crossing(shares_of(plan), plan.tp, samples, end)
        return float(sent), float(gathered) / plan.stages[boundary + 1].replicas

    def crossing(self, plan: Plan, samples: int, cuts: int | list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Bytes through ``cuts``: the bytes that each rank sends, and the bytes that the receivers then gather.

        They are for ``samples`` or, if a micro-batch runs in slices of its sequence, for their mean slice.
        With scattered messages each rank sends an equal part of a whole value (Narayanan et al. 2021, section 4.1).
        """
        return self._find_crossing(shares_of(plan), plan.tp, samples, cuts)

    def _find_crossing(
        self, shares: tuple[Share, ...], tp: int, samples: int, cuts: int | list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        local = np.mean([self._work.work_at(samples, share).crossing[cuts] for share in shares], axis=0)
        if tp == 1 or not self._training.scattered_messages:
            return local, 0 * local
        undivided = [self._work.work_at(samples, share.of_all_shards) for share in shares]
        whole = np.mean([work.crossing[cuts] for work in undivided], axis=0)
        return whole / tp, np.where(local < whole, 0.0, whole)


def _bandwidth(routes: Sequence[Route]) -> float:
    """Bytes of a micro-batch per second for the slowest replica, whose messages go one after the other."""
    if len(routes) == 1:
        return routes[0].link.bandwidth
    busy: dict[tuple[str, int], float] = {}  # replica -> seconds per byte
    for route in routes:
        for replica in (("sender", route.sender), ("receiver", route.receiver)):
            busy[replica] = busy.get(replica, 0.0) + route.part / route.link.bandwidth
    return 1 / max(busy.values())
