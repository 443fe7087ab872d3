"""The units that blocks are made of: inseparable groups of atomic subcomponents, their costs and sent values."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from auto3d.capture.graph import Graph
from auto3d.partition.methods.rannc.atomic import Subcomponent
from auto3d.partition.methods.rannc.dag import strong_components, topological_order
from auto3d.partition.methods.rannc.operation_profile import OperationProfile, value_numbers


@dataclass(frozen=True, slots=True)
class SentValue:
    """A value that one unit makes and others use."""

    bytes: float
    maker: int
    users: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Units:
    """Units in an order in which they can run. A unit is one atomic subcomponent unless it writes a buffer."""

    members: tuple[tuple[Subcomponent, ...], ...]
    after: tuple[frozenset[int], ...]  # per unit, the units that use its values
    sent_values: tuple[SentValue, ...]
    seconds: tuple[float, ...]  # per unit, forward and backward of one micro-batch
    held: tuple[dict[str, float], ...]  # per unit: kept value, or parameter with its gradient and state -> bytes
    memory_bytes: float  # memory of a device

    def fit(self, units: Iterable[int]) -> bool:
        """Whether a device has the memory for these units; tensors that several of them hold count once."""
        union: dict[str, float] = {}
        for unit in units:
            union |= self.held[unit]
        return sum(union.values()) <= self.memory_bytes


def find_units(
    graph: Graph,
    subcomponents: Sequence[Subcomponent],
    *,
    times: OperationProfile,
    sizes: OperationProfile,
    state_factor: float,
    memory_bytes: float,
) -> Units:
    """The units of a model, with the times of one profile and the memory of another.

    ``sizes`` should be the profile of the smallest micro-batch: the micro-batch size is decided later, and units that
    do not fit then never fit. The seconds of a constant operation are divided among its clones, since all clones in one
    block run once.
    """
    owner = {sub.operation: number for number, sub in enumerate(subcomponents)}
    users: dict[str, list[int]] = {}  # non-constant value -> subcomponents that use it
    written: dict[str, list[int]] = {}
    for number, sub in enumerate(subcomponents):
        node = graph.nodes[sub.operation]
        for name in node.reads:
            if graph.producer.get(name) in owner:
                users.setdefault(name, []).append(number)
        for name in graph.written_buffers.intersection(node.state):
            written.setdefault(name, []).append(number)
    maker = {name: owner[graph.producer[name]] for name in users}
    members = _inseparable(len(subcomponents), [(maker[name], user) for name in users for user in users[name]], written)

    unit_of = {number: unit for unit, numbers in enumerate(members) for number in numbers}
    place = value_numbers(graph)
    sent_values: list[SentValue] = []
    after: list[set[int]] = [set() for _ in members]
    for name, numbers in users.items():
        source = unit_of[maker[name]]
        targets = {unit_of[number] for number in numbers} - {source}
        after[source] |= targets
        if targets:
            sent_values.append(SentValue(float(times.value_bytes[place[name]]), source, tuple(sorted(targets))))

    clones = Counter(position for sub in subcomponents for position in sub.constants)
    seconds = [0.0] * len(members)
    held: list[dict[str, float]] = [{} for _ in members]
    for number, sub in enumerate(subcomponents):
        in_unit = held[unit_of[number]]
        for position in sub.positions:
            node = graph.nodes[position]
            both = float(times.forward_s[position] + times.backward_s[position])
            seconds[unit_of[number]] += both / clones.get(position, 1)
            in_unit |= {name: float(sizes.value_bytes[place[name]]) for name in node.saves}
            in_unit[f"{node.name}, inside"] = float(sizes.internal_bytes[position])
            for name in graph.parameters.keys() & set(node.state):
                in_unit[f"{name}, state"] = state_factor * graph.parameters[name].bytes
    return Units(
        members=tuple(tuple(subcomponents[number] for number in numbers) for numbers in members),
        after=tuple(map(frozenset, after)),
        sent_values=tuple(sent_values),
        seconds=tuple(seconds),
        held=tuple(held),
        memory_bytes=memory_bytes,
    )


def _inseparable(count: int, edges: list[tuple[int, int]], written: dict[str, list[int]]) -> list[tuple[int, ...]]:
    """Groups of subcomponents: all users of a written buffer, and everything between them, are in one group.

    The paper has no such buffers. A cycle through the users of each buffer makes exactly these groups strongly
    connected. A group without edges (such as a counter of batches) has no neighbour to merge with, so it joins the
    group before it.
    """
    after: list[set[int]] = [set() for _ in range(count)]
    for source, target in edges:
        after[source].add(target)
    linked = {number for edge in edges for number in edge}
    for users in written.values():
        for user, next_user in pairwise([*users, users[0]]):
            after[user].add(next_user)
    groups: list[list[int]] = []
    for group in sorted(map(sorted, strong_components(after))):
        if groups and linked.isdisjoint(group):
            groups[-1] += group
        else:
            groups.append(group)
    group_of = {number: index for index, group in enumerate(groups) for number in group}
    between = [
        {group_of[target] for number in group for target in after[number]} - {index}
        for index, group in enumerate(groups)
    ]
    order = topological_order(between)
    assert order is not None
    return [tuple(sorted(groups[index])) for index in order]
