"""The work of a model's operations on one device: arithmetic, memory traffic, launches, collectives and memory.

Each array has one entry per position of an operation in the whole Graph, for one micro-batch. The work of a share, that
of a tensor-parallel rank or of a slice of the sequence, follows from its local Graph. A model that is known by its
layers has one entry per layer.
"""

from collections import ChainMap
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from math import gcd, prod
from typing import Any

import numpy as np

from auto3d.capture.graph import Graph, GraphNode
from auto3d.conversions import Collective, Conversion, conversion_of
from auto3d.cost.system_bytes import norms_of, system_bytes
from auto3d.cost.system_times import OWN
from auto3d.cost.systems import System
from auto3d.cost.tensors import WITH_EARLIER, Tensors, tensors_of
from auto3d.derived.local_graph import LocalGraph
from auto3d.partition.stage import crossing_bytes, input_users
from auto3d.share import Share

PRECISION_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ELEMENT_BYTES = 4  # a number in float32
ALIGNED = 16  # bytes: the fastest kernels of GPUs load this many at once (results/cuda, "Matrix products")
# Elementwise operations: a compiler or a hand-tuned system fuses the kernels of neighbours.
_ELEMENTWISE = {
    "add", "alias", "clone", "contiguous", "div", "dropout", "exp", "gelu", "mul", "neg", "pow", "relu", "rsqrt",
    "rsub", "sigmoid", "silu", "sqrt", "sub", "tanh", "to",
}  # fmt: skip
EAGER_NORM = (36.0, 92.0)
"""Bytes per element that an eager norm moves in the forward and in the backward if it takes 2-byte values to float32.

Forward, by operator: the cast (2 + 4), the square (4 + 4), its mean (4), the product with the statistic (4 + 4), the
cast back (4 + 2), the weight (2 + 2). Backward: the weight's two products and the sum of one product (4 + 6 + 2), the
cast (2 + 4), the products with the statistic and of its gradient, whose sum is small (8 + 12 + 4), the mean (4), the
square by pow, mul and mul (8 + 8 + 12), the sum of both gradients (12) and the cast back (4 + 2): formulas of PyTorch's
tools/autograd/derivatives.yaml.
"""
EAGER_NORM_KERNELS = (8, 14)  # the kernels of these operators, and of two on the statistic each way
FLOAT8_CAST = 6.0
"""Bytes per element that an operand moves to become one of 8 bits: 2 for its largest value, 2 to read it again, 1 for
the copy and 1 for the transposed copy (transformer_engine/pytorch/tensor, with current scaling)."""
FLOAT8_CAST_KERNELS = 2  # the largest value; the cast with its transpose
_LOOKUPS = ("aten.embedding", "auto3d.vocabulary_embedding")
_VOCABULARY_LOSS = "auto3d.vocabulary_cross_entropy.default"
_LOSSES = ("aten.cross_entropy_loss", "auto3d.vocabulary_cross_entropy")


@dataclass(frozen=True, kw_only=True)
class TensorExchange:
    """A collective of the ranks of a tensor-parallel group, once per micro-batch.

    It comes right before the operation at ``position``, or right after it. A collective of the backward has the place
    of the forward at which its gradient is the gradient of the value.
    """

    collective: Collective
    position: int
    before: bool  # before the operation at this position in the order of the forward, else after it
    forward: bool  # in the forward, else in the backward
    size: float  # bytes of the whole tensor: of the sum, of the gathered tensor, or of the tensor that is scattered

    @property
    def boundary(self) -> int:
        """The position of the first operation that comes after it in the order of the forward."""
        return self.position if self.before else self.position + 1


@dataclass(frozen=True, kw_only=True)
class Work:
    """Arrays over positions, for one micro-batch on one device. Bytes are in the precision of training."""

    flops: np.ndarray  # FLOPs of matrix products in the forward
    backward_flops: np.ndarray
    weight_flops: np.ndarray  # the part of ``backward_flops`` that computes gradients of weights
    float8_flops: np.ndarray  # the part of ``flops`` whose operands have 8 bits; the backward has the same part
    products: np.ndarray  # number of matrix products in the forward
    backward_products: np.ndarray
    moved: np.ndarray  # bytes that the forward reads and writes, without the operands of matrix products
    backward_moved: np.ndarray
    launches: np.ndarray  # kernels that the forward launches
    backward_launches: np.ndarray
    alignment: np.ndarray  # bytes, at most ALIGNED: rows of the operands of its matrix products begin at multiples
    softmaxes: np.ndarray  # matrices of attention weights (samples × heads) that a fused softmax may take
    parameters: np.ndarray  # elements of trained parameters, at the first operation that uses them
    copied: np.ndarray  # the part of ``parameters`` whose gradients the tensor-parallel ranks add up
    saved: np.ndarray  # bytes of activations kept for the backward, at the first operation that saves them
    deferred: np.ndarray  # under another system: bytes kept after the input half of a split backward
    fixed: np.ndarray  # bytes of state that is not trained, copies of weights too, at the first operation that uses it
    working: np.ndarray  # under another system: bytes of gradients and temporaries of its backward
    blocks: np.ndarray  # repeated blocks that begin at the operation; an attention or a feed-forward counts as a half
    crossing: np.ndarray  # bytes that a cut before the operation sends onward; one entry more than the others
    repeated: tuple[int, int]  # range of the positions of the repeated blocks
    tensors: Tensors  # when each tensor is made, used and saved
    tied: tuple[tuple[float, tuple[int, ...]], ...] = ()
    """(elements, positions) of each parameter that several operations use; ``parameters`` counts it at the first."""
    shared: tuple[tuple[float, tuple[int, ...]], ...] = ()
    """(bytes, positions) of each tensor beside state that a stage holds once if it runs any of the positions: buffers
    of another system, or what depends on no data and is computed once, such as a causal mask."""
    inputs: tuple[tuple[float, frozenset[int]], ...] = ()
    """(bytes, positions of its users, as ``input_users`` has them) of each input of the model; empty: unknown."""
    backward_rate: float = 1.0  # FLOP/s of the products of a backward, relative to a forward's
    shards: int = 1  # tensor-parallel degree
    exchanges: tuple[TensorExchange, ...] = ()  # ordered as in the forward

    def __len__(self) -> int:
        return len(self.flops)

    @cached_property
    def exchanges_of(self) -> tuple[dict[tuple[Collective, float], np.ndarray], ...]:
        """For the forward and the backward: (collective, bytes) -> how many such there are at each position."""
        positions_of: tuple[dict[tuple[Collective, float], list[int]], ...] = ({}, {})
        for exchange in self.exchanges:
            positions_of[0 if exchange.forward else 1].setdefault((exchange.collective, exchange.size), []).append(
                exchange.position
            )
        return tuple(
            {key: np.bincount(positions, minlength=len(self)) for key, positions in way.items()} for way in positions_of
        )


WorkAt = Callable[[int, Share], Work]
"""Arguments: samples, and the share of their work that an operation does."""

_NOT_SUMMED = (
    "alignment", "crossing", "repeated", "tensors", "tied", "shared", "inputs", "backward_rate", "shards", "exchanges",
)  # fmt: skip
_CONSTANT = ("products", "backward_products", "launches", "backward_launches", "parameters", "copied", "blocks")
SUMMED = tuple(item.name for item in fields(Work) if item.name not in _NOT_SUMMED)


def work_of(
    graph: Graph,
    bounds: Sequence[int],
    *,
    precision: str = "float32",
    fused: bool = False,
    fused_attention: bool = True,
    system: System | None = None,
    float8: bool = False,
) -> Work:
    """The work of ``graph`` without tensor parallelism; its subgraphs lie between ``bounds`` (auto3d.partition.merak).

    With ``fused``, neighbouring elementwise operations are one kernel, and so is the softmax where attention is
    not a single kernel; what one rank alone adds to a partial sum is added to the sum. ``fused_attention`` says how
    ``graph`` was described (see ``auto3d.capture.describe``). ``system`` is the training system that is described
    (default: this project's runtime): the bytes that it holds, and what its loss moves.
    With ``float8`` the products of the repeated blocks' weights take operands of 8 bits.
    """
    blocks, repeated = _find_blocks(graph, bounds)
    in_float8 = range(*repeated) if float8 else range(0)
    work = _work(
        graph, precision=precision, fused=fused, fused_attention=fused_attention, system=system, float8=in_float8
    )
    return replace(work, blocks=blocks, repeated=repeated)


def work_of_local(
    whole: Work,
    local: LocalGraph,
    *,
    precision: str = "float32",
    fused: bool = False,
    fused_attention: bool = True,
    system: System | None = None,
    float8: bool = False,
) -> Work:
    """The work of ``local``, the Graph of a share, at the positions of the whole Graph, whose work is ``whole``.

    What is split, exchanged and saved follows from the local Graph alone. See ``work_of`` for the keywords.
    """
    blocks = range(*whole.repeated) if float8 else range(0)
    in_float8 = {place for place, position in enumerate(local.positions) if position in blocks}
    here = _work(
        local.graph,
        precision=precision,
        fused=fused,
        fused_attention=fused_attention,
        system=system,
        float8=in_float8,
    )
    positions = np.array(local.positions)
    arrays: dict[str, Any] = {
        name: np.bincount(positions, getattr(here, name), minlength=len(whole)) for name in SUMMED
    }
    arrays["working"] = np.zeros(len(whole))
    np.maximum.at(arrays["working"], positions, here.working)
    arrays["alignment"] = np.full(len(whole), ALIGNED)
    np.minimum.at(arrays["alignment"], positions, here.alignment)
    arrays["blocks"] = whole.blocks
    names = [name for name in local.graph.parameters if name in local.copied]
    first = {name: i for i, node in reversed(list(enumerate(local.graph.nodes))) for name in node.state}
    for name in names:
        if name in local.graph.trained and name in first:
            arrays["copied"][positions[first[name]]] += prod(local.graph.parameters[name].shape)
    begins = np.searchsorted(positions, np.arange(len(whole) + 1))
    return Work(
        **arrays,
        crossing=here.crossing[begins],
        repeated=whole.repeated,
        tensors=replace(here.tensors, begins=begins),
        tied=tuple((elements, tuple(int(positions[p]) for p in users)) for elements, users in here.tied),
        shared=tuple((size, tuple(int(positions[p]) for p in users)) for size, users in here.shared),
        backward_rate=here.backward_rate,
        shards=local.shards,
        exchanges=exchanges_of(local, scale_of(local.graph, precision)),
    )


def work_scaled(share: Work, whole: Work, other: Work, times: float) -> Work:
    """``share``, the work of a share of ``whole``, at a micro-batch ``times`` as large, where the whole model has the
    work ``other``.

    The share is the same part of each operation there: with 6 of 24 FLOPs, it has 12 of 48 in ``other``. This saves a
    derivation for each size, and is exact where all that an operation does grows alike.
    """

    def scaled(mine: np.ndarray, all_: np.ndarray, there: np.ndarray) -> np.ndarray:
        return np.where(all_ > 0, np.divide(mine, all_, out=np.zeros(len(all_)), where=all_ > 0) * there, times * mine)

    grows = [name for name in SUMMED if name not in _CONSTANT]
    arrays: dict[str, Any] = {
        name: scaled(getattr(share, name), getattr(whole, name), getattr(other, name)) for name in (*grows, "crossing")
    }
    exchanges = tuple(replace(exchange, size=times * exchange.size) for exchange in share.exchanges)
    return replace(share, **arrays, exchanges=exchanges, tensors=share.tensors.scaled(times))


def _work(
    graph: Graph,
    *,
    precision: str,
    fused: bool,
    fused_attention: bool,
    system: System | None,
    float8: Container[int],
) -> Work:
    """The work of the nodes of ``graph``, which may be a local graph; without its blocks and exchanges.

    ``float8`` has the positions at which a product of a weight takes operands of 8 bits.
    """
    scale = scale_of(graph, precision)
    times = OWN if system is None else system.times
    eager = not (fused_attention or fused)
    attention_moved = times.attention_moved if eager else None
    count = len(graph.nodes)
    arrays: dict[str, Any] = {name: np.zeros(count) for name in SUMMED}
    arrays["alignment"] = np.full(count, ALIGNED)
    sizes = _sizes(graph)
    run_of = _fused_runs(graph) if fused else {}
    saved: set[str] = set()
    fixed: set[str] = set()
    copied: set[str] = set()  # parameters whose low-precision copy is counted
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
        for name in node.copies:
            if name not in copied:
                copied.add(name)
                arrays["fixed"][position] += graph.copies[name].bytes
        if node.is_view or node.from_inputs:
            continue
        has_gradient = any(value.differentiable for value in node.outputs)
        arrays["flops"][position], arrays["backward_flops"][position] = node.flops, node.backward_flops
        if (conversion := conversion_of(node.operator)) is not None:
            forward, backward = _converted(conversion, sum(sizes[name] for name in node.reads), made)
            if fused and conversion.name == "spread":
                continue
            arrays["moved"][position], arrays["backward_moved"][position] = scale * forward, scale * backward
            arrays["launches"][position], arrays["backward_launches"][position] = forward > 0, backward > 0
            continue
        forward, backward = _moved(node, sizes)
        if times.loss_moved is not None and node.operator.startswith(_LOSSES):
            logits = max(prod(shape) for shape in _read_shapes(graph, node))
            forward, backward = (logits * factor / scale for factor in times.loss_moved)
        if attention_moved is not None and node.flops and "attention" in node.operator:
            queries, keys = _read_shapes(graph, node)[:2]
            weights = prod(queries[:-1]) * keys[-2]
            forward += weights * attention_moved[0] / scale
            backward += weights * attention_moved[1] / scale
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
            one_kernel = fused_attention and "attention" in node.operator  # it pads rows itself
            if precision != "float32" and not one_kernel:
                arrays["alignment"][position] = _alignment(graph, node, PRECISION_BYTES[precision])
            if fused and not fused_attention and "attention" in node.operator:
                arrays["softmaxes"][position] = prod(node.outputs[0].shape[:2])
            arrays["backward_products"][position] = 2 * arrays["products"][position]
            if graph.trained & set(node.state):
                arrays["weight_flops"][position] = node.backward_flops / 2
                if position in float8:
                    arrays["float8_flops"][position] = node.flops
                    cast = FLOAT8_CAST / ELEMENT_BYTES / scale
                    arrays["moved"][position] += scale * cast * max(sizes[name] for name in node.reads)
                    arrays["launches"][position] += FLOAT8_CAST_KERNELS
                    backward += cast * made
                    arrays["backward_launches"][position] += FLOAT8_CAST_KERNELS
                    shapes = [graph.parameters[name].shape for name in node.state if name in graph.trained]
                    weights = sum(prod(shape) for shape in shapes if len(shape) > 1)
                    arrays["fixed"][position] += 2 * weights  # a copy and a transposed copy, a byte per element
        if has_gradient:
            arrays["backward_moved"][position] = scale * backward
        else:
            arrays["backward_launches"][position] = 0
    if scale == PRECISION_BYTES[precision] / ELEMENT_BYTES < 1 and not (
        fused if system is None else system.fused_norms
    ):
        for norm in norms_of(graph):
            of_norm = max(value.bytes for position in norm for value in graph.nodes[position].outputs) / ELEMENT_BYTES
            for way, factor, kernels in zip(("", "backward_"), EAGER_NORM, EAGER_NORM_KERNELS, strict=True):
                for figure, amount in ((f"{way}moved", factor * of_norm), (f"{way}launches", kernels)):
                    arrays[figure][norm] = 0.0
                    arrays[figure][norm[0]] = amount
    tensors = tensors_of(graph, scale, arrays["saved"])
    shared = _computed_once(graph, scale)
    if system is not None:
        held = system_bytes(graph, system, PRECISION_BYTES[precision])
        arrays |= {"saved": held.saved, "deferred": held.deferred, "working": held.working}
        shared = held.shared
    elements = {name: sizes[name] / graph.parameters[name].item_bytes for name in users}
    for name, positions in users.items():
        arrays["parameters"][positions[0]] += elements[name]
    return Work(
        **arrays,
        crossing=scale * np.array(crossing_bytes(graph), dtype=float),
        repeated=(0, count),
        tensors=tensors,
        tied=tuple((elements[name], tuple(positions)) for name, positions in users.items() if len(positions) > 1),
        shared=shared,
        inputs=tuple((float(graph.inputs[name].bytes), users) for name, users in input_users(graph).items() if users),
        backward_rate=times.eager_backward if eager else 1.0,
    )


def _computed_once(graph: Graph, scale: float) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """(bytes, positions of its users) of each tensor that depends on no input and no state, as ``Work.shared``."""
    owner: dict[str, str] = {}  # value -> the value that owns its memory
    size: dict[str, int] = {}
    users: dict[str, list[int]] = {}
    for position, node in enumerate(graph.nodes):
        if node.from_inputs and not node.state and owner.keys() >= set(node.reads):
            source = owner[node.reads[0]] if node.is_view and node.reads else None
            owner.update({value.name: source or value.name for value in node.outputs})
            size.update({value.name: value.bytes for value in node.outputs})
            continue
        for name in dict.fromkeys(owner[name] for name in node.reads if name in owner):
            users.setdefault(name, []).append(position)
    return tuple((scale * size[name], tuple(positions)) for name, positions in users.items())


def scale_of(graph: Graph, precision: str) -> float:
    """Bytes in ``precision`` over bytes in ``graph``: 1 for a Graph that was captured in it, value by value."""
    if graph.precision == precision:
        return 1.0
    assert graph.precision == "float32", "another system's precision is predicted from a Graph in float32"
    return PRECISION_BYTES[precision] / ELEMENT_BYTES


def _converted(conversion: Conversion, read: float, made: float) -> tuple[float, float]:
    """Bytes that a conversion moves in the forward and in the backward, without what its collectives move."""
    forward = backward = 0.0
    if conversion.forward is None and conversion.name != "copy":
        forward = 2.0 * made  # a slice, or the value among zeros
    if conversion.name in ("gather", "scatter_copy"):
        backward = 2.0 * read if conversion.name == "gather" else read + made
    return forward, backward


def exchanges_of(local: LocalGraph, scale: float) -> tuple[TensorExchange, ...]:
    """The collectives of ``local``, in the order of the forward; a Graph's bytes times ``scale`` are sent."""
    sizes = _sizes(local.graph)
    exchanges: list[TensorExchange] = []
    computed = -1  # largest position of the whole Graph whose operation has come
    for position, node in zip(local.positions, local.graph.nodes, strict=True):
        conversion = conversion_of(node.operator)
        made = sum(value.bytes for value in node.outputs)
        size = scale * max([made, *(sizes[name] for name in (*node.reads, *node.state))])
        steps: list[tuple[Collective, bool, float]] = []
        if conversion is None:
            computed = position
            if node.operator == _VOCABULARY_LOSS:  # the maxima, then the sums with the labels' logits
                classes = max(shape[1] for shape in _read_shapes(local.graph, node) if len(shape) > 1)
                tokens = size / classes
                steps = [(Collective.ALL_REDUCE, True, tokens), (Collective.ALL_REDUCE, True, 2 * tokens)]
        else:
            if conversion.forward is not None:
                steps.append((conversion.forward, True, size))
            if conversion.backward is not None and not node.from_inputs and node.outputs[0].differentiable:
                steps.append((conversion.backward, False, size))
        exchanges += [
            TensorExchange(
                collective=collective, position=position, before=computed < position, forward=forward, size=nbytes
            )
            for collective, forward, nbytes in steps
        ]
    return tuple(exchanges)


def _read_shapes(graph: Graph, node: GraphNode) -> list[tuple[int, ...]]:
    return [(graph.inputs[name] if name in graph.inputs else graph.value(name)).shape for name in node.reads]


def _alignment(graph: Graph, node: GraphNode, item_bytes: int) -> int:
    """The largest power of 2, up to ALIGNED, that divides the bytes of a row of all matrices of ``node``'s products."""
    if "conv" in node.operator:  # its matrices are made by the library
        return ALIGNED
    read = _read_shapes(graph, node)
    values = ChainMap(graph.parameters, graph.buffers, graph.constants)
    state = (values[name].shape for name in node.state)
    rows = [shape[-1] for shape in (*read, *state, *(value.shape for value in node.outputs)) if len(shape) > 1]
    if "attention" in node.operator:
        rows.append(read[1][-2])  # the scores have a column for each key
    return gcd(ALIGNED, *(item_bytes * row for row in rows))


def _sizes(graph: Graph) -> Mapping[str, int]:
    """Name -> bytes, for every value and all state."""
    groups = (graph.inputs, graph.parameters, graph.buffers, graph.constants)
    return {name: value.bytes for group in groups for name, value in group.items()} | {
        value.name: value.bytes for node in graph.nodes for value in node.outputs
    }


def _moved(node: GraphNode, sizes: Mapping[str, int]) -> tuple[float, float]:
    """Bytes that the forward and the backward move.

    The operands and the result of a matrix product hide behind its arithmetic. Intermediate results, such as attention
    weights, do not: one pass writes them and the next reads them, and the backward also reads their gradients twice.
    """
    read = sum(sizes[name] for name in node.reads)
    made = sum(value.bytes for value in node.outputs)
    if node.flops:
        return 2.0 * node.saved_bytes, 3.0 * node.saved_bytes
    if node.operator == WITH_EARLIER:  # the backward joins them again, and adds to the gradients of later slices
        return 2.0 * made, 5.0 * made
    if node.operator.startswith(_LOOKUPS):
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


def _find_blocks(graph: Graph, bounds: Sequence[int]) -> tuple[np.ndarray, tuple[int, int]]:
    """(blocks, repeated) of a Work: what repeats lies between the embedding and the last subgraph, the head.

    A subgraph begins to repeat with its first product with weights. It ends with its last.
    """
    blocks, ends = np.zeros(len(graph.nodes)), []
    sizes = _sizes(graph)
    for first, last in pairwise(bounds):
        for position in range(first, last):
            node = graph.nodes[position]
            if node.operator.startswith(_LOOKUPS) and not node.from_inputs:
                made = sum(value.bytes for value in node.outputs)
                if max((sizes[name] for name in node.state), default=0) > 2 * made:
                    ends.append(position)
        products = [p for p in range(first, last) if graph.nodes[p].flops and set(graph.nodes[p].state) & graph.trained]
        if products:
            blocks[products[0]] = 0.5
            if last != bounds[-1]:
                ends.append(products[-1])
    return blocks, repeated_range(ends, np.flatnonzero(blocks), len(blocks))


def repeated_range(ends: Sequence[int], starts: Sequence[int] | np.ndarray, count: int) -> tuple[int, int]:
    """The range of the repeated blocks among ``count`` positions.

    ``starts`` has the first position of each block, or of each half, and ``ends`` the last position of each block, and
    before them of an embedding: with starts 2, 6 and ends 1, 5, 9, the blocks are the positions 2 to 9, and the range
    (2, 10).
    """
    if not len(starts) or not ends:
        return 0, count
    return ends[0] + 1 if ends[0] < starts[0] else 0, ends[-1] + 1
