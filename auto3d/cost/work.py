"""The work of a model's operations on a device: arithmetic, memory traffic, launches, collectives and memory.

Each array has one entry per position of an operation in the Graph, for one micro-batch, before tensor parallelism
divides it. A model that is known by its layers has one entry per layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import prod

import numpy as np

from auto3d.capture.graph import Graph, GraphNode
from auto3d.partition.stage import crossing_bytes

PRECISION_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ELEMENT_BYTES = 4  # a Graph is captured in float32
# Elementwise operations: a compiler or a hand-tuned system fuses the kernels of neighbours.
_ELEMENTWISE = {
    "add", "alias", "clone", "contiguous", "div", "dropout", "exp", "gelu", "mul", "neg", "pow", "relu", "rsqrt",
    "rsub", "sigmoid", "silu", "sqrt", "sub", "tanh", "to",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Work:
    """Arrays over positions, for one micro-batch. Bytes are in the precision of training."""

    flops: np.ndarray  # FLOPs of matrix products in the forward
    backward_flops: np.ndarray
    weight_flops: np.ndarray  # the part of ``backward_flops`` that computes gradients of weights
    products: np.ndarray  # number of matrix products in the forward
    backward_products: np.ndarray
    moved: np.ndarray  # bytes that the forward reads and writes, without the operands of matrix products
    backward_moved: np.ndarray
    undivided: np.ndarray  # the part of ``moved`` that every tensor-parallel rank moves in full
    launches: np.ndarray  # kernels that the forward launches
    backward_launches: np.ndarray
    softmaxes: np.ndarray  # matrices of attention weights (samples × heads) that a fused softmax may take
    parallel: np.ndarray  # bool: whether tensor parallelism divides the operation
    reduced: np.ndarray  # bytes that tensor-parallel ranks all-reduce after the operation in the forward
    backward_reduced: np.ndarray
    parameters: np.ndarray  # elements of trained parameters, at the first operation that uses them
    saved: np.ndarray  # bytes of activations kept for the backward, at the first operation that saves them
    deferred: np.ndarray  # bytes kept after the input half of a split backward for its weight half
    fixed: np.ndarray  # bytes of state that is not trained, at the first operation that uses it
    working: np.ndarray  # bytes of the operation's operands and results, whose gradients its backward holds
    crossing: np.ndarray  # bytes that a cut before the operation sends onward; one entry more than the others
    tied: tuple[tuple[float, tuple[int, ...]], ...] = ()
    """(elements, positions) of each parameter that several operations use; ``parameters`` counts it at the first."""

    def __len__(self) -> int:
        return len(self.flops)


def work_of(
    graph: Graph,
    bounds: Sequence[int],
    *,
    precision: str = "float32",
    fused: bool = False,
    fused_attention: bool = True,
) -> Work:
    """The work of ``graph``, whose subgraphs lie between ``bounds`` (see ``auto3d.partition.merak``).

    Tensor parallelism divides each subgraph as Megatron-LM divides a block (AMP, section 3.2): from its first product
    with weights, split by columns, to its last, split by rows. The forward has one all-reduce after the last product,
    the backward one before the first. The last subgraph and embedding look-ups are split by the vocabulary. With
    ``fused``, neighbouring elementwise operations are one kernel, and so is the softmax of attention that is not itself
    one kernel. ``fused_attention`` says how ``graph`` was described (see ``auto3d.capture.describe``).
    """
    scale = PRECISION_BYTES[precision] / ELEMENT_BYTES
    count = len(graph.nodes)
    arrays = {item.name: np.zeros(count) for item in fields(Work) if item.name != "tied"}
    arrays["parallel"] = np.zeros(count, dtype=bool)
    arrays["crossing"] = scale * np.array(crossing_bytes(graph), dtype=float)
    sizes = _sizes(graph)
    run_of = _fused_runs(graph) if fused else {}
    saved: set[str] = set()
    fixed: set[str] = set()
    users: dict[str, list[int]] = {}
    for position, node in enumerate(graph.nodes):
        for name in node.saves:
            if name not in saved:
                saved.add(name)
                arrays["saved"][position] += scale * sizes[name]
        arrays["saved"][position] += scale * node.saved_bytes
        for name in node.state:
            if name in graph.trained:
                users.setdefault(name, []).append(position)
            elif name not in fixed:
                fixed.add(name)
                arrays["fixed"][position] += scale * sizes[name]
        made = sum(value.bytes for value in node.outputs)
        weights = sum(sizes[name] for name in node.state if name in graph.parameters)
        arrays["working"][position] = scale * (sum(sizes[name] for name in node.reads) + weights + made)
        if node.is_view or node.from_inputs:
            continue
        has_gradient = any(value.differentiable for value in node.outputs)
        arrays["flops"][position], arrays["backward_flops"][position] = node.flops, node.backward_flops
        forward, backward = _moved(node, sizes)
        if position in run_of:
            first, inside = run_of[position]
            forward, backward = forward - inside, max(0.0, backward - inside)
            arrays["launches"][position] = arrays["backward_launches"][position] = position == first
        else:
            arrays["launches"][position] = 1
            arrays["backward_launches"][position] = 2 if node.state and node.flops else 1
        arrays["moved"][position] = scale * forward
        if node.flops:
            arrays["products"][position] = (
                2 if not node.state else 1
            )  # attention has two: scores, then the weighted sum
            if fused and not fused_attention and "attention" in node.operator:
                arrays["softmaxes"][position] = prod(node.outputs[0].shape[:2])
            arrays["backward_products"][position] = 2 * arrays["products"][position]
            if graph.trained & set(node.state):
                arrays["weight_flops"][position] = node.backward_flops / 2
                arrays["deferred"][position] = scale * (sum(sizes[name] for name in node.reads) + made)
        if has_gradient:
            arrays["backward_moved"][position] = scale * backward
        else:
            arrays["backward_launches"][position] = 0
    _divide(graph, bounds, arrays, scale, sizes)
    elements = {name: sizes[name] / graph.parameters[name].item_bytes for name in users}
    for name, positions in users.items():
        arrays["parameters"][positions[0]] += elements[name]
    tied = tuple((elements[name], tuple(positions)) for name, positions in users.items() if len(positions) > 1)
    return Work(**arrays, tied=tied)


def _sizes(graph: Graph) -> dict[str, int]:
    """Name -> bytes, for every value and all state."""
    groups = (graph.inputs, graph.parameters, graph.buffers, graph.constants)
    return {name: value.bytes for group in groups for name, value in group.items()} | {
        value.name: value.bytes for node in graph.nodes for value in node.outputs
    }


def _moved(node: GraphNode, sizes: dict[str, int]) -> tuple[float, float]:
    """Bytes that the forward and the backward move.

    The operands and the result of a matrix product hide behind its arithmetic. Intermediate results, such as attention
    weights, do not: one pass writes them and the next reads them, and the backward also reads their gradients twice.
    """
    read = sum(sizes[name] for name in node.reads)
    made = sum(value.bytes for value in node.outputs)
    if node.flops:
        return 2.0 * node.saved_bytes, 3.0 * node.saved_bytes
    if node.operator.startswith("aten.embedding"):
        return 2.0 * made, 2.0 * made  # only the rows that are looked up move, not the table
    state = sum(sizes[name] for name in node.state)
    # The backward moves the gradients of results, operands and state, and what the forward saved.
    saved = sum(sizes[name] for name in node.saves) + node.saved_bytes
    return read + state + made + node.saved_bytes, made + saved + read + state


def _fused_runs(graph: Graph) -> dict[int, tuple[int, float]]:
    """Position -> (first position of its fused run, bytes that the run keeps in registers and so need not move)."""
    uses: dict[str, set[int]] = {}
    for position, node in enumerate(graph.nodes):
        for name in node.reads:
            uses.setdefault(name, set()).add(position)
    runs: dict[int, tuple[int, float]] = {}
    run: list[int] = []
    nodes: list[GraphNode | None] = [*graph.nodes, None]  # None ends the last run
    for position, current in enumerate(nodes):
        if current is not None and not current.from_inputs and current.operator.split(".")[1] in _ELEMENTWISE:
            run.append(position)
            continue
        if current is not None and (current.is_view or current.from_inputs):
            continue
        members = set(run)
        made = {value.name: value.bytes for p in run for value in graph.nodes[p].outputs}
        for p in run:
            inside = sum(made.get(name, 0) for name in graph.nodes[p].reads)
            private = [value for value in graph.nodes[p].outputs if uses.get(value.name, set()) <= members]
            runs[p] = run[0], inside + sum(value.bytes for value in private if uses.get(value.name))
        run = []
    return runs


def _divide(
    graph: Graph, bounds: Sequence[int], arrays: dict[str, np.ndarray], scale: float, sizes: dict[str, int]
) -> None:
    """Fill in which operations tensor parallelism divides, and the bytes that it all-reduces."""
    for first, last in pairwise(bounds):
        products = [p for p in range(first, last) if arrays["flops"][p] and set(graph.nodes[p].state) & graph.trained]
        for position in range(first, last):
            node = graph.nodes[position]
            if node.operator.startswith("aten.embedding") and arrays["moved"][position]:
                largest = max((sizes[name] for name in node.state), default=0)
                arrays["parallel"][position] = largest > 2 * sum(value.bytes for value in node.outputs)
                if arrays["parallel"][position]:
                    arrays["reduced"][position] = arrays["moved"][position] / 2
        if not products:
            continue
        end = last - 1 if last == bounds[-1] else products[-1]
        arrays["parallel"][products[0] : end + 1] = True
        if last != bounds[-1]:
            arrays["reduced"][end] = scale * sum(value.bytes for value in graph.nodes[end].outputs)
        arrays["backward_reduced"][products[0]] = scale * sum(sizes[name] for name in graph.nodes[products[0]].reads)
