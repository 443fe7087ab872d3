"""Merak's graph sharding: a model as a sequence of subgraphs, from which stages are made.

Lai et al., Merak (TPDS 2023), section 4.2, algorithms 1 and 2; section 5.2 of the version of 2022. Where this differs
from what is printed there, a comment says why. The sequence follows from the model alone.
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
    """A Graph as a sequence of subgraphs: each uses the one value that the last one gives, common nodes, and inputs.

    The subgraphs follow each other in the Graph's order, so stages that are cut at some of ``bounds`` consist of whole
    subgraphs. Operations that depend on graph inputs alone are repeated wherever they are used, not passed on.
    """

    bounds: tuple[int, ...]  # subgraph i holds the operations from bounds[i] to before bounds[i + 1]
    common: dict[str, int]  # values that pass through subgraphs which do not use them -> how many operations use each
    first_user: dict[str, int]  # graph input -> the first subgraph that uses it

    @property
    def subgraphs(self) -> tuple[range, ...]:
        """The positions of each subgraph's operations."""
        return tuple(range(first, last) for first, last in pairwise(self.bounds))


def shard(graph: Graph, subgraphs: int | None = None) -> Sharding:
    """``graph`` as a sequence of ``subgraphs`` subgraphs, each with parameters; None: as many as there can be.

    Takes O(n log n) for n operations. Raises PartitionError where the model does not divide into so many.
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
    """The Sharding whose fields ``content`` holds."""
    return Sharding(bounds=tuple(content["bounds"]), common=content["common"], first_user=content["first_user"])


def common_nodes(graph: Graph) -> dict[str, int]:
    """The values that several layers use, such as an encoder's output, and how many operations use each.

    The paper calls a node common that has more users than the model has layers. That needs the number of layers, misses
    what only some layers use, and in a model of two layers takes every hidden state for one; here a value is common if
    members of one module list use it that are not the same: layer 3 and layer 4.
    """
    users: dict[str, list[int]] = {}
    for position, node in enumerate(graph.nodes):
        for name in node.reads:
            if name in graph.producer and not graph.nodes[graph.producer[name]].from_inputs:
                users.setdefault(name, []).append(position)
    found = {}
    for name, positions in users.items():
        members = {member for position in positions for member in _memberships(graph.nodes[position].module)}
        if len(members) > len({modules for modules, _ in members}):
            found[name] = len(positions)
    return found


def sharding_bounds(graph: Graph, common: dict[str, int], parameters: Sequence[int], *, threshold: float) -> list[int]:
    """Algorithm 2: bounds of the subgraphs, each closed once it has more than ``threshold`` parameters.

    ``parameters[i]`` counts those before operation i. The subgraphs that are closed are kept as a stack of their last
    operations: to put a node into an earlier subgraph, with all between, is to take some from the stack, where the
    paper gives each of these nodes its new number and so takes quadratic time on long skips.
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
        # An operation here may make several values, and only one is to be sent; the loss ends the last subgraph.
        sent = [value for value in node.outputs if last_use.get(value.name, -1) > position]
        if len(sent) == 1 and parameters[position + 1] - parameters[first] > threshold:
            closed.append(position)
    # The paper makes subgraphs 0 to s - 1, and so forgets what follows the last one that was closed. It belongs to that
    # one unless it has parameters enough itself.
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

    Not so in the paper: a graph input ties nothing, since a stage loads what it uses; else T5's labels, which its
    decoder reads first and its loss last, would hold both together. Operations that write to one buffer do.
    """
    node = graph.nodes[position]
    current = len(closed)
    found = current
    for name in node.reads:
        maker = graph.producer.get(name)
        if name in common or maker is None or graph.nodes[maker].from_inputs:
            continue
        inside = bisect_left(closed, maker)  # the subgraph that holds it
        is_output = inside < current and closed[inside] == maker
        found = min(found, inside + 1 if is_output else inside)
    for buffer in node.state:
        if buffer in buffer_user:
            found = min(found, bisect_left(closed, buffer_user[buffer]))
    if closed and visited == closed[-1]:
        # The node begins a subgraph. One that does not use the last one's output begins a branch of its own, as GPT-2's
        # position embedding after that of the words does; the two are no sequence. In the paper the position numbers,
        # made by an earlier node, hold it there.
        output = {value.name for value in graph.nodes[visited].outputs}
        if output.isdisjoint(node.reads):
            found = min(found, current - 1)
    return found


def _joined(weights: Sequence[int], count: int) -> list[int]:
    """Bounds of ``count`` groups of neighbours, each heavier than a threshold that is as high as it can be.

    The paper's threshold, the mean, makes 50 subgraphs of GPT-2 with 48 layers where 98 are asked for, since an
    attention block has but two thirds of the mean. This one is the highest that makes enough of them. Where it makes
    too many, because many layers are alike, the later ones take the next higher threshold, which makes too few: each
    group that changes over makes at most one less, so some number of them makes exactly ``count``.
    """

    def groups(threshold: int, low: int) -> list[int]:
        bounds, weight = [0], 0
        for index, own in enumerate(weights):
            weight += own
            if weight > (threshold if len(bounds) <= low else threshold + 1):
                bounds.append(index + 1)
                weight = 0
        return [*bounds[:-1], len(weights)] if len(bounds) > 1 else [0, len(weights)]

    fewer = bisect_right(range(sum(weights)), -count, key=lambda threshold: 1 - len(groups(threshold, len(weights))))
    threshold = fewer - 1
    low = bisect_left(range(len(weights)), count, key=lambda low: len(groups(threshold, low)) - 1)
    return groups(threshold, low)


def _parameters(graph: Graph) -> list[int]:
    """Elements of the parameters that each operation uses; tied ones count at each, as each stage holds a copy."""
    sizes = {name: prod(value.shape) for name, value in graph.parameters.items()}
    return [sum(sizes.get(name, 0) for name in node.state) for node in graph.nodes]


@cache
def _memberships(path: str) -> tuple[tuple[str, str], ...]:
    """The module lists that a module lies in, and its number there: ``h.3.mlp`` is in (("h", "3"),)."""
    parts = path.split(".")
    return tuple((".".join(parts[:depth]), part) for depth, part in enumerate(parts) if part.isdigit())


def _first_users(graph: Graph, bounds: Sequence[int]) -> dict[str, int]:
    """The subgraph that first needs each graph input, itself or through operations that are repeated."""
    needs: dict[str, frozenset[str]] = {name: frozenset({name}) for name in graph.inputs}
    found: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        inputs = frozenset().union(*(needs.get(name, ()) for name in node.reads))
        if node.from_inputs:
            needs |= dict.fromkeys((value.name for value in node.outputs), inputs)
            continue
        for name in inputs:
            found.setdefault(name, bisect_right(bounds, position) - 1)
    return {name: found[name] for name in graph.inputs if name in found}
