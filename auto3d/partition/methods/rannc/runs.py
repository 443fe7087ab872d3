"""What every run of consecutive blocks would cost as a stage, for all runs at once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from auto3d.capture.graph import Graph
from auto3d.partition.cost import PartitionCosts
from auto3d.partition.methods.rannc.atomic import Subcomponent
from auto3d.partition.methods.rannc.profile import Profile, value_numbers


@dataclass(frozen=True, kw_only=True)
class RunCosts:
    """One micro-batch. Arrays of [first block, last block], both in the run; below the diagonal they mean nothing."""

    forward_s: np.ndarray  # without messages
    backward_s: np.ndarray
    send_s: np.ndarray  # of results that later blocks use
    send_back_s: np.ndarray  # of gradients of what earlier blocks made
    saved_bytes: np.ndarray  # what autograd keeps
    received_bytes: np.ndarray  # inputs, made by earlier blocks or loaded
    state_bytes: np.ndarray  # weights, gradients, optimizer state


class Runs:
    """The runs of one sequence of blocks.

    A run counts once what several of its blocks use: a constant operation, a parameter, a value received or kept. A
    result is sent once, although two later stages may use it: which stages there will be is not known yet.
    """

    def __init__(self, graph: Graph, blocks: Sequence[Sequence[Subcomponent]], costs: PartitionCosts) -> None:
        self.blocks = len(blocks)
        self._costs = costs
        number = value_numbers(graph)
        parameters = {name: place for place, name in enumerate(graph.parameters)}
        operations: dict[int, list[int]] = {}  # item -> the blocks that use it, in sequence; as are the next three
        kept: dict[int, list[int]] = {}
        state: dict[int, list[int]] = {}
        used: dict[int, list[int]] = {}
        maker = dict.fromkeys(range(len(graph.inputs)), -1)  # value -> its block, of those that are not constant
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

    def at(self, profile: Profile) -> RunCosts:
        def message_s(table: np.ndarray) -> np.ndarray:
            return np.where(table > 0, self._costs.latency_s + table / self._costs.bandwidth, 0.0)

        values, blocks = profile.value_bytes, self.blocks
        inside = self._operations.total(profile.internal_bytes, blocks)
        return RunCosts(
            forward_s=self._operations.total(profile.forward_s, blocks),
            backward_s=self._operations.total(profile.backward_s, blocks),
            send_s=message_s(self._sent.total(values, blocks)),
            send_back_s=message_s(self._sent_back.total(values, blocks)),
            saved_bytes=inside + self._kept.total(values, blocks),
            received_bytes=self._received.total(values, blocks),
            state_bytes=self._state_bytes,
        )


@dataclass(frozen=True, slots=True)
class _Rectangles:
    """Items that a run counts if its first and its last block lie within bounds, both bounds included."""

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
        """For each run the weights of what it counts: put down at the corners, then summed along both axes."""
        corners = np.zeros((blocks + 1, blocks + 1))
        weight = weights[self.item]
        np.add.at(corners, (self.first_from, self.last_from), weight)
        np.add.at(corners, (self.first_to + 1, self.last_from), -weight)
        np.add.at(corners, (self.first_from, self.last_to + 1), -weight)
        np.add.at(corners, (self.first_to + 1, self.last_to + 1), weight)
        return corners.cumsum(0).cumsum(1)[:blocks, :blocks]


def _having(places: Mapping[int, Sequence[int]], blocks: int, maker: Mapping[int, int] | None = None) -> _Rectangles:
    """Runs that have one of the blocks of an item and, where it has a ``maker``, begin after that.

    Runs are told apart by the first such block that they have, so none counts an item twice.
    """
    rows = []
    for item, users in places.items():
        before = -1 if maker is None else maker[item]
        for user in users:
            if user > before:
                rows.append((item, before + 1, user, user, blocks - 1))
                before = user
    return _Rectangles.of(rows)
