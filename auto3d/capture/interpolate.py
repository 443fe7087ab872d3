"""The Graph at any micro-batch size from those at two: sizes and FLOPs are affine in the number of samples."""

from collections.abc import Callable
from dataclasses import replace

from auto3d.capture.graph import Graph, GraphNode, Value
from auto3d.errors import InputError


def interpolate(first: Graph, second: Graph, micro_batch_size: int) -> Graph:
    """The Graph for micro-batches of so many samples, with the operations of ``first``.

    For planning alone: no program stands behind it, so it has no fingerprint. Raises InputError if the model's code
    does something else at the two sizes.
    """
    if [node.name for node in first.nodes] != [node.name for node in second.nodes]:
        raise InputError(
            f"the model's operations at micro-batch size {first.micro_batch_size} are not those at "
            f"{second.micro_batch_size}: what it takes at other sizes cannot be told from these"
        )
    number = _line(first.micro_batch_size, second.micro_batch_size, micro_batch_size)

    def value(a: Value, b: Value) -> Value:
        return replace(a, shape=tuple(map(number, a.shape, b.shape)))

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
    """What is one number at ``first`` and another at ``second``: how much is it at ``wanted``?"""
    return lambda a, b: a if a == b else max(0, a + (b - a) * (wanted - first) // (second - first))
