"""What tensor parallelism does to a model: which weights it splits, why others stay whole, and what the ranks exchange.

This is what ``auto3d capture --tp N`` prints.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import fx

from auto3d.capture.nodes import args_of
from auto3d.conversions import Collective, conversion_of
from auto3d.derived.model import Derived
from auto3d.tensor.collectives import VOCABULARY_CROSS_ENTROPY
from auto3d.tensor.rules import RULES
from auto3d.tensor.ways import OperationWays, operations_of
from auto3d.tensor_placement import PlacementKind, Split

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, kw_only=True)
class WeightSplit:
    """How one weight of a product, or one table, is held: ``split``, or else the ``reason`` why it is whole."""

    weight: str
    shape: tuple[int, ...]
    split: Split | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class CollectiveTotal:
    """The collectives of one kind that the ranks of a group run for one micro-batch."""

    collective: Collective
    phase: str  # FORWARD or BACKWARD
    count: int
    bytes: int
    """Sum of the sizes of what is reduced, of the results of gathers and of the operands of reduce-scatters."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What ``shards`` ranks do of one model. Shares are fractions from 0 to 1."""

    shards: int
    weights: tuple[WeightSplit, ...]  # every weight that a product multiplies by, and every table of an embedding
    split_flops: float  # share of the forward's FLOPs in operations that the ranks divide among them
    split_bytes: float  # share of the bytes of all parameters that is in split parameters
    exchanges: tuple[CollectiveTotal, ...]


def explain(model: Derived) -> Explanation:
    """The explanation of ``model``, for one micro-batch of its size."""
    graph, local = model.whole.graph, model.program.graph
    flops = {node.name: node.flops for node in local.nodes}
    divided = sum(node.flops for node in graph.nodes if flops.get(node.name, 0) < node.flops)
    total_bytes = sum(value.bytes for value in graph.parameters.values())
    split_bytes = sum(graph.parameters[name].bytes for name in model.split if name in graph.parameters)
    return Explanation(
        shards=model.share.tp,
        weights=tuple(_weights(model)),
        split_flops=divided / max(1, sum(node.flops for node in graph.nodes)),
        split_bytes=split_bytes / max(1, total_bytes),
        exchanges=exchanges(model),
    )


def exchanges(model: Derived) -> tuple[CollectiveTotal, ...]:
    """The collectives of one micro-batch, by kind and phase."""
    sums: dict[tuple[str, Collective], tuple[int, int]] = {}
    for node in model.program.exported.program.nodes:
        for phase, collective, size in _collectives_of(node):
            count, bytes_so_far = sums.get((phase, collective), (0, 0))
            sums[phase, collective] = count + 1, bytes_so_far + size
    return tuple(
        CollectiveTotal(
            collective=collective, phase=phase, count=sums[phase, collective][0], bytes=sums[phase, collective][1]
        )
        for phase in (FORWARD, BACKWARD)
        for collective in Collective
        if (phase, collective) in sums
    )


def _collectives_of(node: fx.Node) -> Iterator[tuple[str, Collective, int]]:
    """(phase, collective, bytes) of what the node exchanges."""
    if node.target is VOCABULARY_CROSS_ENTROPY:
        labels = args_of(node)[1]
        of_one = prod(labels.meta["val"].shape) * node.meta["val"].element_size()
        yield FORWARD, Collective.ALL_REDUCE, of_one  # the maxima
        yield FORWARD, Collective.ALL_REDUCE, 2 * of_one  # the sums of exponentials and the labels' logits
        return
    conversion = conversion_of(node.target)
    if conversion is None:
        return
    source = args_of(node)[0]
    size = max(source.meta["val"].nbytes, node.meta["val"].nbytes)
    if conversion.forward is not None:
        yield FORWARD, conversion.forward, size
    if conversion.backward is not None and source.meta["val"].requires_grad:
        yield BACKWARD, conversion.backward, size


def _weights(model: Derived) -> Iterator[WeightSplit]:
    operations = operations_of(model.whole, model.share, pinned={})
    names = model.whole.exported.parameters
    shapes = {name: value.shape for name, value in model.whole.graph.parameters.items()}
    users = _users(operations, names.keys())
    for placeholder, name in names.items():
        products = [
            (operation, node)
            for operation, node in users.get(placeholder, ())
            if operation.rule.product and node in operation.weights
        ]
        unruled = [operation for operation, _ in users.get(placeholder, ()) if operation.call.operator not in RULES]
        if len(shapes[name]) < 2 or not (products or unruled):
            continue
        split = model.split.get(name)
        reason = "" if split is not None else _reason(model, shapes[name], products, unruled)
        yield WeightSplit(weight=name, shape=shapes[name], split=split, reason=reason)


def _users(
    operations: Sequence[OperationWays], names: Collection[str]
) -> dict[str, list[tuple[OperationWays, fx.Node]]]:
    """Placeholder of a parameter -> the operations that use it, or a view of it, and the operand that they use."""
    origin: dict[fx.Node, str] = {}
    users: dict[str, list[tuple[OperationWays, fx.Node]]] = {}
    for operation in operations:
        call = operation.call
        operands = dict.fromkeys(call.operands)
        for node in operands:
            if node.op == "placeholder" and node.name in names:
                origin.setdefault(node, node.name)
            if node in origin:
                users.setdefault(origin[node], []).append((operation, node))
        if len(operands) == 1 and not operation.rule.product and (only := call.operands[0]) in origin:
            origin.update(dict.fromkeys(call.result_nodes, origin[only]))
    return users


def _reason(
    model: Derived,
    shape: tuple[int, ...],
    products: Sequence[tuple[OperationWays, fx.Node]],
    unruled: Sequence[OperationWays],
) -> str:
    if unruled:
        return f"no rule says how {unruled[0].call.operator} can be split"
    for operation, node in products:
        places = [place for place, operand in enumerate(operation.call.operands) if operand is node]
        if not any(way.needs[place].kind is PlacementKind.SPLIT for way in operation.ways for place in places):
            sizes = " × ".join(map(str, shape))
            return f"{operation.call.operator} cannot split its {sizes} evenly among {model.share.tp} ranks"
    return "splitting it needs more communication"
