"""A Graph as JSON and back. Operations are rows without keys, since a model has thousands with the same fields."""

from collections.abc import Mapping
from typing import Any

from auto3d.capture.graph import Graph, GraphNode, Value


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """``graph`` as lists, dicts, strings, numbers and Booleans."""
    return {
        "nodes": [
            [
                node.name,
                node.operator,
                node.reads,
                node.state,
                [_value_row(value) for value in node.outputs],
                node.module,
                node.flops,
                node.backward_flops,
                node.saves,
                node.saved_bytes,
                node.from_inputs,
                node.is_view,
                node.copies,
            ]
            for node in graph.nodes
        ],
        "inputs": _rows(graph.inputs),
        "parameters": _rows(graph.parameters),
        "buffers": _rows(graph.buffers),
        "constants": _rows(graph.constants),
        "trained": sorted(graph.trained),
        "written_buffers": sorted(graph.written_buffers),
        "loss": graph.loss,
        "micro_batch_size": graph.micro_batch_size,
        "fingerprint": graph.fingerprint,
        "precision": graph.precision,
        "copies": _rows(graph.copies),
    }


def graph_from_json(content: Mapping[str, Any]) -> Graph:
    """The Graph from which ``graph_to_json`` made ``content``."""
    return Graph(
        nodes=tuple(_node(row) for row in content["nodes"]),
        inputs=_values(content["inputs"]),
        parameters=_values(content["parameters"]),
        buffers=_values(content["buffers"]),
        constants=_values(content["constants"]),
        trained=frozenset(content["trained"]),
        written_buffers=frozenset(content["written_buffers"]),
        loss=content["loss"],
        micro_batch_size=content["micro_batch_size"],
        fingerprint=content["fingerprint"],
        precision=content["precision"],
        copies=_values(content["copies"]),
    )


def _node(row: list) -> GraphNode:
    (
        name,
        operator,
        reads,
        state,
        outputs,
        module,
        flops,
        backward_flops,
        saves,
        saved_bytes,
        from_inputs,
        is_view,
        copies,
    ) = row
    return GraphNode(
        name,
        operator,
        tuple(reads),
        tuple(state),
        tuple(_value(output) for output in outputs),
        module,
        flops,
        backward_flops,
        tuple(saves),
        saved_bytes,
        from_inputs,
        is_view,
        tuple(copies),
    )


def _value_row(value: Value) -> list:
    return [value.name, value.shape, value.dtype, value.item_bytes, value.differentiable]


def _value(row: list) -> Value:
    name, shape, dtype, item_bytes, differentiable = row
    return Value(name, tuple(shape), dtype, item_bytes, differentiable)


def _rows(values: Mapping[str, Value]) -> list:
    return [_value_row(value) for value in values.values()]


def _values(rows: list) -> dict[str, Value]:
    return {row[0]: _value(row) for row in rows}
