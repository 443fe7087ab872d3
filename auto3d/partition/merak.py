"""Merak's graph sharding: a model as a sequence of subgraphs, of which stages are made.

Lai et al., Merak (TPDS 2023), section 4.2, algorithms 1 and 2; section 5.2 of the version of 2022. Comments explain
every difference from the printed algorithms. The sequence depends on the model alone.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from auto3d.capture.graph import Graph
from auto3d.partition.stage import PartitionError


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """A Graph as a sequence of subgraphs. Each uses one value of the subgraph before it, common nodes, and graph
    inputs.

    The subgraphs are in the Graph's order, so stages that are cut at some of ``bounds`` consist of whole subgraphs.
    Operations that depend on graph inputs alone are repeated where their results are used; the results are not sent.
    """

    bounds: tuple[int, ...]  # subgraph i holds the operations from bounds[i] to before bounds[i + 1]
    common: dict[str, int]  # value that passes through subgraphs which do not use it -> number of operations that do
    first_user: dict[str, int]  # graph input -> the first subgraph that uses it

    @property
    def subgraphs(self) -> tuple[range, ...]:
        """The positions of each subgraph's operations."""
        return tuple(range(first, last) for first, last in pairwise(self.bounds))


def shard(graph: Graph, subgraphs: int | None = None) -> Sharding:
    """``graph`` as a sequence of ``subgraphs`` subgraphs, each with parameters; None: as many as possible.

    Takes O(n log n) for n operations. Raises PartitionError where the model does not divide into this number.
    """
    common = common_nodes(graph)
    parameters = [0, *accumulate(_parameters(graph))]  # before each operation
    finest = sharding_bounds(graph, common, parameters, threshold=0)
    bounds = finest
    if subgraphs is not None:
        if not 1 <= subgraphs < len(finest):
            raise PartitionError(
                f"{subgraphs} subgraphs, but this model divides into at least 1 and at most {len(finest) - 1}"
            )
        weights = [parameters[last] - parameters[first] for first, last in pairwise(finest)]
        bounds = [finest[index] for index in _joined(weights, subgraphs)]
    return Sharding(bounds=tuple(bounds), common=common, first_user=_first_users(graph, bounds))


def sharding_from_json(content: Mapping[str, Any]) -> Sharding:
    """The Sharding that was written as JSON; ``content`` has its fields."""
    return Sharding(bounds=tuple(content["bounds"]), common=content["common"], first_user=content["first_user"])


def common_nodes(graph: Graph) -> dict[str, int]:
    """Values that several layers use, such as an encoder's output -> the number of operations that use each value.

    The paper calls a node common if it has more users than the model has layers. That rule needs the number of layers,
    misses values that only some layers use, and calls every hidden state of a model of two layers common. Here a value
    is common if different members of one module list use it, such as layer 3 and layer 4.
    """
    users: dict[str, list[int]] = {}
    for position, node in enumerate(graph.nodes):
        for name in node.reads:
            if name in graph.producer and not graph.nodes[graph.producer[name]].from_inputs:
                users.setdefault(name, []).append(position)
    counts = {}
    for name, positions in users.items():
        members = {member for position in positions for member in _memberships(graph.nodes[position].module)}
        if len(members) > len({modules for modules, _ in members}):
            counts[name] = len(positions)
    return counts


def sharding_bounds(graph: Graph, common: dict[str, int], parameters: Sequence[int], *, threshold: float) -> list[int]:
    """Algorithm 2: bounds of the subgraphs, each closed once it has more than ``threshold`` parameters.

    ``parameters[i]`` counts the parameters before operation i. Closed subgraphs are kept as a stack of their last
    operations. To move a node into an earlier subgraph, with everything between, the stack is popped; the paper
    renumbers all of these nodes instead and so takes quadratic time on long skips.
    """
    last_use = {name: position for position, node in enumerate(graph.nodes) for name in node.reads}
    buffer_user: dict[str, int] = {}  # written buffer -> the last operation on it so far
    closed: list[int] = []
    visited = -1
    for position, node in enumerate(graph.nodes):
        if node.from_inputs:
            continue
        subgraph = _search_dependency(graph, position, closed, visited, common, buffer_user)
        del closed[subgraph:]
        buffer_user |= dict.fromkeys(graph.written_buffers & set(node.state), position)
        visited = position
        first = closed[-1] + 1 if closed else 0
        # Here an operation may make several values, but a subgraph may send only one; the loss ends the last subgraph.
        sent = [value for value in node.outputs if last_use.get(value.name, -1) > position]
        if len(sent) == 1 and parameters[position + 1] - parameters[first] > threshold:
            closed.append(position)
    # The paper makes subgraphs 0 to s - 1 and so forgets the operations after the last closed subgraph. They belong to
    # that subgraph unless they have enough parameters for a subgraph of their own.
    if closed and parameters[-1] - parameters[closed[-1] + 1] <= threshold:
        closed.pop()
    return [0, *(position + 1 for position in closed), len(graph.nodes)]


def _search_dependency(
    graph: Graph,
    position: int,
    closed: Sequence[int],
    visited: int,
    common: dict[str, int],
    buffer_user: dict[str, int],
) -> int:
    """Algorithm 1: the number of the subgraph into which the operation at ``position`` must go.

    Unlike in the paper, a graph input ties no operations together, since each stage loads the inputs that it uses.
    Otherwise T5's labels, which its decoder reads first and its loss last, would tie the whole decoder. Operations that
    write to one buffer are tied together.
    """
    node = graph.nodes[position]
    current = len(closed)
    subgraph = current
    for name in node.reads:
        maker = graph.producer.get(name)
        if name in common or maker is None or graph.nodes[maker].from_inputs:
            continue
        inside = bisect_left(closed, maker)  # the subgraph that holds it
        is_output = inside < current and closed[inside] == maker
        subgraph = min(subgraph, inside + 1 if is_output else inside)
    for buffer in node.state:
        if buffer in buffer_user:
            subgraph = min(subgraph, bisect_left(closed, buffer_user[buffer]))
    if closed and visited == closed[-1]:
        # The node begins a subgraph. If it does not use the output of the last subgraph, it begins a separate branch,
        # as GPT-2's position embedding does after the word embedding; the two are not a sequence. In the paper the
        # position numbers, which an earlier node makes, tie it to that subgraph.
        output = {value.name for value in graph.nodes[visited].outputs}
        if output.isdisjoint(node.reads):
            subgraph = min(subgraph, current - 1)
    return subgraph


def _joined(weights: Sequence[int], count: int) -> list[int]:
    """Bounds of ``count`` groups of neighbours, each heavier than a threshold that is as high as possible.

    The paper uses the mean as its threshold. For GPT-2 with 48 layers that makes 50 subgraphs where 98 are wanted,
    since an attention block has only two thirds of the mean. Here the threshold is the highest that makes enough
    groups. If it makes too many, because many layers are alike, later groups use the next higher threshold, which makes
    too few. Each group that changes over makes at most one group less, so some number of changes makes exactly
    ``count``.
    """

    def groups(threshold: int, low: int) -> list[int]:
        bounds, weight = [0], 0
        for index, added in enumerate(weights):
            weight += added
            if weight > (threshold if len(bounds) <= low else threshold + 1):
                bounds.append(index + 1)
                weight = 0
        return [*bounds[:-1], len(weights)] if len(bounds) > 1 else [0, len(weights)]

    fewer = bisect_right(range(sum(weights)), -count, key=lambda threshold: 1 - len(groups(threshold, len(weights))))
    threshold = fewer - 1
    low = bisect_left(range(len(weights)), count, key=lambda low: len(groups(threshold, low)) - 1)
    return groups(threshold, low)


def _parameters(graph: Graph) -> list[int]:
    """Elements of the parameters that each operation uses; tied parameters count at each use: each stage has a copy."""
    sizes = {name: prod(value.shape) for name, value in graph.parameters.items()}
    return [sum(sizes.get(name, 0) for name in node.state) for node in graph.nodes]


@cache
def _memberships(path: str) -> tuple[tuple[str, str], ...]:
    """(module list, member) for each list that contains the module at ``path``: (("h", "3"),) for ``h.3.mlp``."""
    parts = path.split(".")
    return tuple((".".join(parts[:depth]), part) for depth, part in enumerate(parts) if part.isdigit())


def _first_users(graph: Graph, bounds: Sequence[int]) -> dict[str, int]:
    """Graph input -> the first subgraph that needs it, directly or through operations that are repeated."""
    needs: dict[str, frozenset[str]] = {name: frozenset({name}) for name in graph.inputs}
    first_user: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        inputs = frozenset().union(*(needs.get(name, ()) for name in node.reads))
        if node.from_inputs:
            needs |= dict.fromkeys((value.name for value in node.outputs), inputs)
            continue
        for name in inputs:
            first_user.setdefault(name, bisect_right(bounds, position) - 1)
    return {name: first_user[name] for name in graph.inputs if name in first_user}
