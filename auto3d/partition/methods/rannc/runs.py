"""The costs of every run of consecutive blocks as a stage, for all runs at once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from auto3d.capture.graph import Graph
from auto3d.partition.cost import PartitionCosts
from auto3d.partition.methods.rannc.atomic import Subcomponent
from auto3d.partition.methods.rannc.operation_profile import OperationProfile, value_numbers


@dataclass(frozen=True, kw_only=True)
class RunCosts:
    """Costs of one micro-batch: arrays of [first block, last block], both in the run; unused below the diagonal."""

    forward_s: np.ndarray  # forward without messages: the longer of the operations and of their launches
    backward_s: np.ndarray
    handling_s: np.ndarray  # compute that the messages of one pass cost, received and sent
    send_s: np.ndarray  # sending results to later blocks
    send_back_s: np.ndarray  # sending gradients to earlier blocks
    saved_bytes: np.ndarray  # activations that autograd keeps
    received_bytes: np.ndarray  # inputs, received from earlier blocks or loaded
    state_bytes: np.ndarray  # weights, gradients, optimizer state


class Runs:
    """The runs of one sequence of blocks.

    A run counts everything once that several of its blocks use: constant operations, parameters, received and kept
    values. It sends a result once, although two later stages may use it, since the stages are not known yet.
    """

    def __init__(self, graph: Graph, blocks: Sequence[Sequence[Subcomponent]], costs: PartitionCosts) -> None:
        self.blocks = len(blocks)
        self._costs = costs
        number = value_numbers(graph)
        parameters = {name: place for place, name in enumerate(graph.parameters)}
        operations: dict[int, list[int]] = {}  # operation -> the blocks that use it, in sequence; the next three alike
        kept: dict[int, list[int]] = {}
        state: dict[int, list[int]] = {}
        used: dict[int, list[int]] = {}
        maker = dict.fromkeys(range(len(graph.inputs)), -1)  # non-constant value -> its block
        differentiable = set()
        for block, subcomponents in enumerate(blocks):
            for sub in subcomponents:
                for value in graph.nodes[sub.operation].outputs:
                    maker[number[value.name]] = block
                    if value.differentiable:
                        differentiable.add(number[value.name])
            for position in {position for sub in subcomponents for position in sub.positions}:
                node = graph.nodes[position]
                operations.setdefault(position, []).append(block)
                for table, items in (
                    (kept, (number[name] for name in node.saves)),
                    (state, (parameters[name] for name in node.state if name in parameters)),
                    (used, (number[name] for name in node.reads)),
                ):
                    for item in items:
                        table.setdefault(item, []).append(block)
        received = {value: users for value, users in used.items() if value in maker}
        self._operations = _having(operations, self.blocks)
        self._kept = _having(kept, self.blocks)
        self._received = _having(received, self.blocks, maker)
        self._messages = _having({v: users for v, users in received.items() if maker[v] >= 0}, self.blocks, maker)
        self._sent_back = _having(
            {v: users for v, users in received.items() if v in differentiable}, self.blocks, maker
        )
        self._sent = _Rectangles.of(
            (value, 0, maker[value], maker[value], max(users) - 1)
            for value, users in received.items()
            if max(users) > maker[value] >= 0
        )
        weights = np.array([value.bytes for value in graph.parameters.values()], float)
        self._state_bytes = costs.state_factor * _having(state, self.blocks).total(weights, self.blocks)

    def at(self, profile: OperationProfile) -> RunCosts:
        def message_s(table: np.ndarray) -> np.ndarray:
            return np.where(table > 0, self._costs.latency_s + table / self._costs.bandwidth, 0.0)

        def handling_s(table: np.ndarray) -> np.ndarray:
            per_message, per_byte = self._costs.handling
            return np.where(table > 0, per_message + table * per_byte, 0.0)

        def seconds(busy: np.ndarray, launch: np.ndarray) -> np.ndarray:
            return np.maximum(self._operations.total(busy, blocks), self._operations.total(launch, blocks))

        values, blocks = profile.value_bytes, self.blocks
        inside = self._operations.total(profile.internal_bytes, blocks)
        sent = self._sent.total(values, blocks)
        return RunCosts(
            forward_s=seconds(profile.forward_s, profile.forward_launch_s),
            backward_s=seconds(profile.backward_s, profile.backward_launch_s),
            handling_s=handling_s(sent) + handling_s(self._messages.total(values, blocks)),
            send_s=message_s(sent),
            send_back_s=message_s(self._sent_back.total(values, blocks)),
            saved_bytes=inside + self._kept.total(values, blocks),
            received_bytes=self._received.total(values, blocks),
            state_bytes=self._state_bytes,
        )


@dataclass(frozen=True, slots=True)
class _Rectangles:
    """Items that a run counts if its first and last block lie within these bounds, which are inclusive."""

    item: np.ndarray
    first_from: np.ndarray
    first_to: np.ndarray
    last_from: np.ndarray
    last_to: np.ndarray

    @staticmethod
    def of(rows: Iterable[tuple[int, int, int, int, int]]) -> "_Rectangles":
        table = np.array(list(rows), int).reshape(-1, 5)
        return _Rectangles(*table.T)

    def total(self, weights: np.ndarray, blocks: int) -> np.ndarray:
        """Per run, the total weight of the items that it counts: weights at the corners, then sums along both axes."""
        corners = np.zeros((blocks + 1, blocks + 1))
        weight = weights[self.item]
        np.add.at(corners, (self.first_from, self.last_from), weight)
        np.add.at(corners, (self.first_to + 1, self.last_from), -weight)
        np.add.at(corners, (self.first_from, self.last_to + 1), -weight)
        np.add.at(corners, (self.first_to + 1, self.last_to + 1), weight)
        return corners.cumsum(0).cumsum(1)[:blocks, :blocks]


def _having(places: Mapping[int, Sequence[int]], blocks: int, maker: Mapping[int, int] | None = None) -> _Rectangles:
    """Rectangles of the runs that contain one of an item's blocks and, if the item has a ``maker``, begin after it.

    Each run falls under the first such block that it contains, so none counts an item twice.
    """
    rows = []
    for item, users in places.items():
        before = -1 if maker is None else maker[item]
        for user in users:
            if user > before:
                rows.append((item, before + 1, user, user, blocks - 1))
                before = user
    return _Rectangles.of(rows)
