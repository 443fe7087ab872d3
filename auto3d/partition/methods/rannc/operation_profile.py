"""Seconds and bytes of one micro-batch in each operation and value of a model, at any micro-batch size."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from auto3d.capture.graph import Graph
from auto3d.partition.cost import PartitionCosts


@dataclass(frozen=True, kw_only=True)
class OperationProfile:
    """Costs at one micro-batch size: operations by position in the Graph, values in the order of ``value_numbers``.

    Bytes are in the precision of training.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    forward_launch_s: np.ndarray
    backward_launch_s: np.ndarray
    internal_bytes: np.ndarray  # per operation, bytes that it keeps for its backward besides values
    value_bytes: np.ndarray


def value_numbers(graph: Graph) -> dict[str, int]:
    """Name of each graph input and each operation's result -> its index in ``OperationProfile.value_bytes``."""
    made = (value.name for node in graph.nodes for value in node.outputs)
    return {name: number for number, name in enumerate((*graph.inputs, *made))}


class OperationProfiles:
    """The profiles of one model, each made at its first use.

    Costs are sampled at ``smallest``, at powers of two and at ``largest``; between two samples they are interpolated
    linearly. That is exact for bytes, which are affine in the micro-batch size, and close for times. The paper measures
    every size that its search meets: dozens, with unequal replicas, against about ten samples here.
    """

    def __init__(
        self,
        graph_at: Callable[[int], Graph],
        costs_at: Callable[[int], PartitionCosts],
        *,
        smallest: int,
        largest: int,
    ) -> None:
        self.smallest = smallest
        self.graph = graph_at(smallest)
        self.costs = costs_at(smallest)  # for costs that do not depend on the micro-batch size
        self._graph_at, self._costs_at = graph_at, costs_at
        powers = (2**power for power in range(largest.bit_length()))
        self._sizes = sorted({smallest, largest, *(power for power in powers if power > smallest)})
        self._known: dict[int, OperationProfile] = {}

    def at(self, size: int) -> OperationProfile:
        """The profile for micro-batches of ``size`` samples, from ``smallest`` to ``largest``."""
        if size not in self._known:
            place = bisect_right(self._sizes, size) - 1
            low = self._sizes[place]
            self._known[size] = self._sample(size) if low == size else self._between(low, self._sizes[place + 1], size)
        return self._known[size]

    def _sample(self, size: int) -> OperationProfile:
        graph = self.graph if size == self.smallest else self._graph_at(size)
        costs = self.costs if size == self.smallest else self._costs_at(size)
        made = [value.bytes for node in graph.nodes for value in node.outputs]
        scale, none = costs.activation_factor, np.zeros(len(graph.nodes))
        return OperationProfile(
            forward_s=np.array(costs.forward_s),
            backward_s=np.array(costs.backward_s),
            forward_launch_s=none if costs.forward_launch_s is None else np.array(costs.forward_launch_s),
            backward_launch_s=none if costs.backward_launch_s is None else np.array(costs.backward_launch_s),
            internal_bytes=scale * np.array([node.saved_bytes for node in graph.nodes], float),
            value_bytes=scale * np.array([*(value.bytes for value in graph.inputs.values()), *made], float),
        )

    def _between(self, low: int, high: int, size: int) -> OperationProfile:
        weight = (size - low) / (high - low)
        below, above = self.at(low), self.at(high)
        both = {
            field.name: (getattr(below, field.name), getattr(above, field.name)) for field in fields(OperationProfile)
        }
        mixed = {name: (1 - weight) * first + weight * last for name, (first, last) in both.items()}
        return OperationProfile(**{name: np.rint(mixed[name]) if "bytes" in name else mixed[name] for name in mixed})
