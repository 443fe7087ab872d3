"""What the operations of a model ask of a device: arithmetic, traffic, launches, collectives and memory.

Everything is by the position of an operation in the Graph, for one micro-batch, before it is divided by a
tensor-parallel degree; measured layers give the same form, with a layer in the place of an operation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import prod

import numpy as np

from auto3d.capture.graph import Graph, GraphNode
from auto3d.partition.stage import crossing_bytes

PRECISION_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ELEMENT_BYTES = 4  # of the Graph, which is captured in float32
# Operations that compute each element by itself: a compiler, or a system that was tuned by hand, fuses their kernels.
_ELEMENTWISE = {
    "add", "alias", "clone", "contiguous", "div", "dropout", "exp", "gelu", "mul", "neg", "pow", "relu", "rsqrt",
    "rsub", "sigmoid", "silu", "sqrt", "sub", "tanh", "to",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Work:
    """Arrays over positions. Bytes are in the precision of training, of one micro-batch."""

    flops: np.ndarray  # of matrix products, forward
    backward_flops: np.ndarray
    weight_flops: np.ndarray  # of the backward: those for the gradients of weights
    products: np.ndarray  # how many there are, forward
    backward_products: np.ndarray
    moved: np.ndarray  # bytes that the forward reads and writes beside those of matrix products
    backward_moved: np.ndarray
    undivided: np.ndarray  # of what the forward moves where it is parallel, bytes that every tensor-parallel rank moves
    launches: np.ndarray  # kernels of the forward
    backward_launches: np.ndarray
    softmaxes: np.ndarray  # matrices of attention weights, samples × heads, where a fused kernel may take them
    parallel: np.ndarray  # bool: tensor parallelism divides it
    reduced: np.ndarray  # bytes that tensor-parallel ranks all-reduce after it, forward
    backward_reduced: np.ndarray
    parameters: np.ndarray  # elements of the trained parameters that it uses first
    saved: np.ndarray  # bytes of activations that wait for the backward, at the operation that first saves them
    deferred: np.ndarray  # bytes that the weight half of a split backward needs, from the input half on
    fixed: np.ndarray  # bytes of state that does not train, at the operation that uses it first
    working: np.ndarray  # bytes that the operation alone reads and makes, as its backward does again
    crossing: np.ndarray  # bytes that a cut before it sends onward; one longer than the others
    tied: tuple[tuple[float, tuple[int, ...]], ...] = ()
    """Parameters that several operations use: how many elements, and which; ``parameters`` has them at the first."""

    def __len__(self) -> int:
        return len(self.flops)


def work_of(graph: Graph, bounds: Sequence[int], *, precision: str = "float32", fused: bool = False) -> Work:
    """The work of ``graph``, whose subgraphs lie between ``bounds`` (``auto3d.partition.merak``).

    Tensor parallelism divides each subgraph as Megatron-LM divides a block (AMP, section 3.2): from its first product
    with weights, by columns, to its last, by rows, with one all-reduce after it and one in the backward before the
    first. A last subgraph, and one that looks rows up, is divided by the vocabulary. ``fused``: kernels of elementwise
    operations that follow each other are one.
    """
    scale = PRECISION_BYTES[precision] / ELEMENT_BYTES
    count = len(graph.nodes)
    found = {item.name: np.zeros(count) for item in fields(Work) if item.name != "tied"}
    found["parallel"] = np.zeros(count, dtype=bool)
    found["crossing"] = scale * np.array(crossing_bytes(graph), dtype=float)
    sizes = _sizes(graph)
    run_of = _fused_runs(graph) if fused else {}
    saved: set[str] = set()
    fixed: set[str] = set()
    users: dict[str, list[int]] = {}
    for position, node in enumerate(graph.nodes):
        for name in node.saves:
            if name not in saved:
                saved.add(name)
                found["saved"][position] += scale * sizes[name]
        found["saved"][position] += scale * node.saved_bytes
        for name in node.state:
            if name in graph.trained:
                users.setdefault(name, []).append(position)
            elif name not in fixed:
                fixed.add(name)
                found["fixed"][position] += scale * sizes[name]
        made = sum(value.bytes for value in node.outputs)
        weights = sum(sizes[name] for name in node.state if name in graph.parameters)
        found["working"][position] = scale * (sum(sizes[name] for name in node.reads) + weights + made)
        if node.is_view or node.from_inputs:
            continue
        learns = any(value.differentiable for value in node.outputs)
        found["flops"][position], found["backward_flops"][position] = node.flops, node.backward_flops
        forward, backward = _moved(node, sizes)
        if position in run_of:
            first, inside = run_of[position]
            forward, backward = forward - inside, max(0.0, backward - inside)
            found["launches"][position] = found["backward_launches"][position] = position == first
        else:
            found["launches"][position] = 1
            found["backward_launches"][position] = 2 if node.state and node.flops else 1
        found["moved"][position] = scale * forward
        if node.flops:
            found["products"][position] = 2 if not node.state else 1  # attention: scores, and what they weigh
            if fused and "attention" in node.operator:
                found["softmaxes"][position] = prod(node.outputs[0].shape[:2])
            found["backward_products"][position] = 2 * found["products"][position]
            if graph.trained & set(node.state):
                found["weight_flops"][position] = node.backward_flops / 2
                found["deferred"][position] = scale * (sum(sizes[name] for name in node.reads) + made)
        if learns:
            found["backward_moved"][position] = scale * backward
        else:
            found["backward_launches"][position] = 0
    _divide(graph, bounds, found, scale, sizes)
    elements = {name: sizes[name] / graph.parameters[name].item_bytes for name in users}
    for name, positions in users.items():
        found["parameters"][positions[0]] += elements[name]
    tied = tuple((elements[name], tuple(positions)) for name, positions in users.items() if len(positions) > 1)
    return Work(**found, tied=tied)


def _sizes(graph: Graph) -> dict[str, int]:
    """Bytes of every value and of all state, by name."""
    groups = (graph.inputs, graph.parameters, graph.buffers, graph.constants)
    return {name: value.bytes for group in groups for name, value in group.items()} | {
        value.name: value.bytes for node in graph.nodes for value in node.outputs
    }


def _moved(node: GraphNode, sizes: dict[str, int]) -> tuple[float, float]:
    """Bytes of forward and backward. What a product reads and writes hides behind its arithmetic, but not what is
    made on the way, such as the weights of attention, which one pass writes and the next reads; in the backward their
    gradients too are read twice."""
    given = sum(sizes[name] for name in node.reads)
    made = sum(value.bytes for value in node.outputs)
    if node.flops:
        return 2.0 * node.saved_bytes, 3.0 * node.saved_bytes
    if node.operator.startswith("aten.embedding"):
        return 2.0 * made, 2.0 * made  # the rows that are looked up, not the table
    state = sum(sizes[name] for name in node.state)
    # Backward: the gradient of what was made, what was saved, and the gradients of what was read and of the state.
    saved = sum(sizes[name] for name in node.saves) + node.saved_bytes
    return given + state + made + node.saved_bytes, made + saved + given + state


def _fused_runs(graph: Graph) -> dict[int, tuple[int, float]]:
    """Position -> (first position of its run, bytes that it need not move, since the run keeps them in registers)."""
    uses: dict[str, set[int]] = {}
    for position, node in enumerate(graph.nodes):
        for name in node.reads:
            uses.setdefault(name, set()).add(position)
    found: dict[int, tuple[int, float]] = {}
    run: list[int] = []
    for position, node in [*enumerate(graph.nodes), (len(graph.nodes), None)]:
        if node is not None and not node.from_inputs and node.operator.split(".")[1] in _ELEMENTWISE:
            run.append(position)
            continue
        if node is not None and (node.is_view or node.from_inputs):
            continue
        members = set(run)
        made = {value.name: value.bytes for p in run for value in graph.nodes[p].outputs}
        for p in run:
            inside = sum(made.get(name, 0) for name in graph.nodes[p].reads)
            own = [value for value in graph.nodes[p].outputs if uses.get(value.name, set()) <= members]
            found[p] = run[0], inside + sum(value.bytes for value in own if uses.get(value.name))
        run = []
    return found


def _divide(graph: Graph, bounds: Sequence[int], found: dict, scale: float, sizes: dict[str, int]) -> None:
    """What tensor parallelism divides and reduces."""
    for first, last in pairwise(bounds):
        products = [p for p in range(first, last) if found["flops"][p] and set(graph.nodes[p].state) & graph.trained]
        for position in range(first, last):
            node = graph.nodes[position]
            if node.operator.startswith("aten.embedding") and found["moved"][position]:
                largest = max((sizes[name] for name in node.state), default=0)
                found["parallel"][position] = largest > 2 * sum(value.bytes for value in node.outputs)
                if found["parallel"][position]:
                    found["reduced"][position] = found["moved"][position] / 2
        if not products:
            continue
        end = last - 1 if last == bounds[-1] else products[-1]
        found["parallel"][products[0] : end + 1] = True
        if last != bounds[-1]:
            found["reduced"][end] = scale * sum(value.bytes for value in graph.nodes[end].outputs)
        found["backward_reduced"][products[0]] = scale * sum(sizes[name] for name in graph.nodes[products[0]].reads)
