"""Whether data fits a model: its integers index the rows of tables of the model, such as embeddings of tokens."""

from auto3d.capture.graph import Graph, GraphNode
from auto3d.data.field import TOKEN_KINDS
from auto3d.data.interface import DataError, Source
from auto3d.data.keys import DataKeys

_EMBEDDING = "aten.embedding.default"


def check_fit(graph: Graph, data: DataKeys, source: Source) -> None:
    """Raise DataError if an input may hold an index beyond the embedding that it is looked up in.

    Only inputs that reach the embedding unchanged are known; what the model computes with them first is not followed.
    """
    largest = largest_values(data, source)
    for node in graph.nodes:
        if node.operator != _EMBEDDING or not node.state:
            continue
        name, rows = _input_of(graph, node), graph.parameters.get(node.state[0])
        if name is None or rows is None or (maximum := largest.get(name)) is None or maximum < rows.shape[0]:
            continue
        problem = f"found values up to {maximum} in the data; {node.state[0]} has {rows.shape[0]} rows"
        raise DataError(f"data.inputs.{name}: {problem}, so that values must be below {rows.shape[0]}")


def largest_values(data: DataKeys, source: Source) -> dict[str, int]:
    """Input of integers -> the largest value that it holds, where that is known."""
    largest: dict[str, int] = {}
    for name, field in data.inputs.items():
        values = [field.largest]
        if field.kind in TOKEN_KINDS:
            values += [source.largest(None), source.pad if field.kind == "tokens" else None]
        elif field.kind == "column" and field.dtype_name == "int64":
            values.append(source.largest(field.column or name))
        if known := [value for value in values if value is not None]:
            largest[name] = max(known)
    return largest


def _input_of(graph: Graph, node: GraphNode) -> str | None:
    """The graph input that ``node`` reads, itself or through views; None if it reads something else."""
    while len(node.reads) == 1:
        if (name := node.reads[0]) in graph.inputs:
            return name
        node = graph.nodes[graph.producer[name]]
        if not node.is_view:
            return None
    return None
