"""Interpolate a model's Graph between two micro-batch sizes: sizes and FLOPs are affine in the number of samples."""

from collections.abc import Callable
from dataclasses import replace

from auto3d.capture.graph import Graph, GraphNode, Value
from auto3d.errors import InputError


def interpolate(first: Graph, second: Graph, micro_batch_size: int) -> Graph:
    """The Graph for micro-batches of ``micro_batch_size`` samples, with the operations of ``first``.

    It serves only for planning: it has no program and so no fingerprint. Raises InputError if the model has other
    operations at one of the two sizes than at the other.
    """
    if [node.name for node in first.nodes] != [node.name for node in second.nodes]:
        raise InputError(
            f"the model has other operations at micro-batch size {first.micro_batch_size} than at "
            f"{second.micro_batch_size}, so its cost at {micro_batch_size} cannot be interpolated; capture it at "
            f"{micro_batch_size} instead"
        )
    number = _line(first.micro_batch_size, second.micro_batch_size, micro_batch_size)

    def value(a: Value, b: Value) -> Value:
        return a if a.shape == b.shape else replace(a, shape=tuple(map(number, a.shape, b.shape)))

    def node(a: GraphNode, b: GraphNode) -> GraphNode:
        return replace(
            a,
            outputs=tuple(map(value, a.outputs, b.outputs)),
            flops=number(a.flops, b.flops),
            backward_flops=number(a.backward_flops, b.backward_flops),
            saved_bytes=number(a.saved_bytes, b.saved_bytes),
        )

    return replace(
        first,
        nodes=tuple(map(node, first.nodes, second.nodes)),
        inputs={name: value(first.inputs[name], second.inputs[name]) for name in first.inputs},
        constants={name: value(first.constants[name], second.constants[name]) for name in first.constants},
        micro_batch_size=micro_batch_size,
        fingerprint="",
    )


def _line(first: int, second: int, wanted: int) -> Callable[[int, int], int]:
    """A function that takes a number at size ``first`` and at size ``second``, and gives the number at ``wanted``."""
    return lambda a, b: a if a == b else max(0, a + (b - a) * (wanted - first) // (second - first))
