"""The bytes that another system's kernels save and need, from the Graph of an unmodified model, by its data flow.

A model may write a norm or an activation in several operations, each of which saves tensors. A system that runs them as
a single kernel saves only what enters it. No name of a module or class is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from auto3d.capture.graph import Graph, GraphNode, Value
from auto3d.cost.systems import System

_POINTWISE = {
    "add", "div", "exp", "gelu", "mul", "neg", "pow", "rsqrt", "rsub", "sigmoid", "silu", "sqrt", "sub", "tanh",
}  # fmt: skip
_STATISTICS = {"mean", "var", "sum"}
_LAYOUT = {"contiguous", "clone"}  # copies to another layout, in which a system's kernels write at once
_LOSSES = {"cross_entropy_loss", "vocabulary_cross_entropy"}
_GATHERS = {"gather", "gather_copy"}
STATISTIC_BYTES = 4  # a log-sum-exp, float32
MASK_BYTES = 1  # an element of a dropout mask


@dataclass(frozen=True)
class SystemBytes:
    """Arrays with an entry per node of the Graph; see the fields of the same names of Work.

    ``shared`` has (bytes, positions) of each buffer that a device holds once if it runs any of the positions.
    """

    saved: np.ndarray
    deferred: np.ndarray
    working: np.ndarray
    shared: tuple[tuple[float, tuple[int, ...]], ...]


def system_bytes(graph: Graph, system: System, float_bytes: float) -> SystemBytes:
    """The bytes of ``graph``, captured in float32, under ``system`` with ``float_bytes`` per floating-point element."""
    return _Reader(graph, system, float_bytes).bytes()


def norms_of(graph: Graph) -> list[list[int]]:
    """The positions of each norm of ``graph`` that the model writes in several operations."""
    regions = _Reader(graph, System(), STATISTIC_BYTES).regions()
    return [region for region in regions if any(_name(graph.nodes[position]) in _STATISTICS for position in region)]


class _Reader:
    def __init__(self, graph: Graph, system: System, float_bytes: float) -> None:
        self._graph, self._system, self._float_bytes = graph, system, float_bytes
        made = {value.name: value for node in graph.nodes for value in node.outputs}
        self._values: dict[str, Value] = {**graph.inputs, **made}
        self._owner: dict[str, str] = {}
        self._gathered: dict[str, str] = {}  # a gathered value -> the shard that it was gathered from
        for node in graph.nodes:
            if (node.is_view or _name(node) in _LAYOUT) and node.reads:
                self._owner |= {value.name: self.owner(node.reads[0]) for value in node.outputs}
            if _name(node) in _GATHERS:
                self._gathered[node.outputs[0].name] = node.reads[0]
        self._replaced = self._inputs_of_fused_kernels()

    def owner(self, name: str) -> str:
        """The value that holds the memory of ``name``."""
        return self._owner.get(name, name)

    def size(self, name: str) -> float:
        value = self._values[name]
        return prod(value.shape) * (self._float_bytes if value.dtype.startswith("float") else value.item_bytes)

    def bytes(self) -> SystemBytes:
        count = len(self._graph.nodes)
        saved, deferred, working = np.zeros(count), np.zeros(count), np.zeros(count)
        known: set[str] = set()
        for position, node in enumerate(self._graph.nodes):
            for name in self._saved(position, node):
                if name not in known:
                    known.add(name)
                    saved[position] += self.size(name)
            saved[position] += self._unnamed(node)
            if not (node.is_view or node.from_inputs):
                working[position] = self._gradients(node)
                if node.flops and self._graph.trained & set(node.state):
                    deferred[position] = working[position]
                for name in node.reads:
                    if name in self._gathered and not self._system.keeps_gathered:
                        working[position] += self.size(name)  # gathered again
        shared = self._placeholders(working) if self._system.gradient_placeholders else []
        attentions = [position for position, node in enumerate(self._graph.nodes) if _is_attention(node)]
        if attentions and self._system.attention_buffer and not self._system.fused_attention:
            largest = max(self._weights(self._graph.nodes[position]) for position in attentions)
            shared.append((self._float_bytes * largest, tuple(attentions)))
        return SystemBytes(saved, deferred, working, tuple(shared))

    def _saved(self, position: int, node: GraphNode) -> Iterator[str]:
        """The values that ``node`` saves, by the owner of their memory."""
        if position in self._replaced:
            names: tuple[str, ...] = self._replaced[position]
        elif _is_attention(node):
            names = (*node.reads[:3], node.outputs[0].name)
        else:
            names = node.saves
        for name in map(self.owner, names):
            shard = self._gathered.get(name)
            yield name if shard is None or self._system.keeps_gathered else self.owner(shard)

    def _unnamed(self, node: GraphNode) -> float:
        """Bytes that ``node`` saves beside values of the Graph."""
        kind = _name(node)
        if _is_attention(node):
            return self._attention(node)
        if kind in _LOSSES:
            return self._system.loss_saved * self._logits(node)
        if "dropout" in kind:
            return MASK_BYTES * prod(node.outputs[0].shape) if node.saved_bytes else 0.0
        return float(node.saved_bytes)

    def _attention(self, node: GraphNode) -> float:
        query, key, value = (self._values[name] for name in node.reads[:3])
        total = 0.0
        if self._system.packed_attention and prod(key.shape) == prod(query.shape):
            total += self.size(key.name) + self.size(value.name)
        if self._system.fused_attention:
            return total + STATISTIC_BYTES * prod(query.shape[:-1])
        dropout = any("dropout" in _name(other) for other in self._graph.nodes)
        return total + self._weights(node) * (self._float_bytes + dropout * (MASK_BYTES + self._float_bytes))

    def _weights(self, node: GraphNode) -> int:
        """Elements of the matrices of attention weights: one for each sample and head."""
        query, key = (self._values[name].shape for name in node.reads[:2])
        return prod(query[:-1]) * key[-2]

    def _gradients(self, node: GraphNode) -> float:
        """Bytes of the gradients of what ``node`` makes and reads, which its backward holds together."""
        if _name(node) in _LOSSES:
            return self._system.loss_working * self._logits(node)
        names = {self.owner(name) for name in node.reads if self._values[name].differentiable}
        total = sum(map(self.size, names)) + sum(self.size(value.name) for value in node.outputs)
        if _is_attention(node) and not self._system.fused_attention:
            total += 2 * self._float_bytes * self._weights(node)  # before and after the softmax
        return total

    def _logits(self, node: GraphNode) -> int:
        return max(prod(self._values[name].shape) for name in node.reads)

    def _inputs_of_fused_kernels(self) -> dict[int, tuple[str, ...]]:
        """Position of the first operation of each fused kernel -> values that the kernel saves; () for its others."""
        replaced: dict[int, tuple[str, ...]] = {}
        for region in self.regions():
            nodes = [self._graph.nodes[position] for position in region]
            made = {value.name for node in nodes for value in node.outputs}
            inside = {self.owner(name) for name in made}
            is_norm = any(_name(node) in _STATISTICS for node in nodes)
            fused = self._system.fused_norms if is_norm else self._system.fused_activations
            saves = {name for node in nodes for name in node.saves}
            if fused and saves & inside:
                entering = {self.owner(name) for node in nodes for name in node.reads} - inside
                kept = tuple(sorted(name for name in entering | (saves - inside) if name in self._values))
                replaced |= dict.fromkeys(region, ()) | {region[0]: kept}
        return replaced

    def regions(self) -> list[list[int]]:
        """Positions of pointwise operations and statistics that are connected by values, in order of the first.

        An addition of two values of the model ends a region: a residual is a tensor of its own.
        """
        region_of: dict[str, int] = {}  # value -> region
        regions: list[list[int]] = []
        read_by: list[set[str]] = []  # per region: owners of the values that it reads
        for position, node in enumerate(self._graph.nodes):
            if node.from_inputs:
                continue
            entering = sorted({region_of[name] for name in node.reads if name in region_of})
            if node.is_view:
                region_of |= {value.name: entering[0] for value in node.outputs if entering}
                continue
            if _name(node) not in _POINTWISE | _STATISTICS or self._joins(
                node, [read_by[at] for at in entering], region_of
            ):
                continue
            if not entering:
                regions.append([])
                read_by.append(set())
                entering = [len(regions) - 1]
            target = entering[0]
            for other in entering[1:]:
                regions[target] += regions[other]
                regions[other] = []
                read_by[target] |= read_by[other]
                region_of = {name: target if at == other else at for name, at in region_of.items()}
            regions[target].append(position)
            read_by[target].update(map(self.owner, node.reads))
            region_of |= {value.name: target for value in node.outputs}
        return [sorted(region) for region in regions if len(region) > 1]

    def _joins(self, node: GraphNode, read_by: Sequence[set[str]], region_of: Mapping[str, int]) -> bool:
        """Whether ``node`` adds two values of the same shape, of which the first or the second comes from elsewhere.

        ``read_by`` has what the regions read that ``node`` would belong to. GELU adds a polynomial of a value to it.
        """
        if _name(node) != "add" or len(node.reads) < 2:
            return False
        shapes = {self._values[name].shape for name in node.reads}
        return len(shapes) == 1 and any(
            name not in region_of and not any(self.owner(name) in read for read in read_by) for name in node.reads
        )

    def _placeholders(self, working: np.ndarray) -> list[tuple[float, tuple[int, ...]]]:
        """The buffers of unused gradients; the buffer of the product before the loss is added to ``working``.

        Products of one input have their weights in one tensor, as the projections of queries, keys and values have.
        """
        together: dict[str, list[int]] = {}
        for position, node in enumerate(self._graph.nodes):
            if node.flops and node.reads and self._graph.trained & set(node.state):
                together.setdefault(self.owner(node.reads[0]), []).append(position)
        loss_reads = {self.owner(name) for node in self._graph.nodes if _name(node) in _LOSSES for name in node.reads}
        shapes: dict[tuple[int, int], list[int]] = {}
        for group in together.values():
            nodes = [self._graph.nodes[position] for position in group]
            sizes = [self._weight(node) for node in nodes]
            if any(self.owner(node.outputs[0].name) in loss_reads for node in nodes):
                working[group[-1]] += self._float_bytes * sum(sizes)
                continue
            width = self._values[nodes[0].reads[0]].shape[-1]
            shapes.setdefault((width, sum(sizes) // width), []).extend(group)
        return [(self._float_bytes * prod(shape), tuple(at)) for shape, at in shapes.items()]

    def _weight(self, node: GraphNode) -> int:
        """Elements of the largest parameter that ``node`` multiplies with."""
        return max(prod(self._graph.parameters[name].shape) for name in node.state if name in self._graph.parameters)


def _name(node: GraphNode) -> str:
    return node.operator.split(".")[1]


def _is_attention(node: GraphNode) -> bool:
    return "attention" in _name(node) and len(node.reads) >= 3
