"""The trained parameters of a stage, each with its name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from auto3d.cost.memory.segment import Span
from auto3d.cost.memory.tensors import Tensors
from auto3d.cost.tables import WorkTables


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A trained parameter, or all parameters of a layer where the model is known by its layers alone."""

    number: int  # its number in Tensors; -1 for all parameters of a layer
    name: str
    elements: float
    shape: tuple[int, ...]
    gradient: float  # bytes of the gradient that a backward makes
    low: float  # bytes of its copy in low precision


def parameters_of(tables: WorkTables, operations: Sequence[Span]) -> Iterator[Parameter]:
    """The trained parameters that ``operations``, spans of the whole Graph, use, each once."""
    tensors = tables.work.tensors
    if not tensors.parameters:
        yield from _of_layers(tables, operations)
        return
    used = [_states(tensors, span) for span in local_spans(tensors, operations)]
    for number in dict.fromkeys(number for each in used for number in each):
        yield Parameter(
            number=number,
            name=tensors.parameters[number],
            elements=float(prod(tensors.shapes[number])),
            shape=tensors.shapes[number],
            gradient=float(tensors.gradient[number]),
            low=float(tensors.low_gradient[number]),
        )


def _of_layers(tables: WorkTables, operations: Sequence[Span]) -> Iterator[Parameter]:
    work = tables.work
    total = 0.0
    for position in (position for span in operations for position in range(*span)):
        total += (elements := float(work.parameters[position]))
        yield _layer(f"parameters of {work.tensors.operations[position]}", elements)
    yield _layer("parameters tied to other layers", tables.parameters(operations) - total)


def _layer(name: str, elements: float) -> Parameter:
    return Parameter(number=-1, name=name, elements=elements, shape=(), gradient=0.0, low=0.0)


def _states(tensors: Tensors, span: Span) -> list[int]:
    """The parameters that the operations of a span of the rank's own positions use, with repetitions."""
    return tensors.state_of[slice(*np.searchsorted(tensors.state_at, span))].tolist()


def local_spans(tensors: Tensors, spans: Sequence[Span]) -> tuple[Span, ...]:
    """``spans`` of the whole Graph as positions of the operations that a rank runs."""
    if tensors.begins is None:
        return tuple(spans)
    begins = tensors.begins
    return tuple((int(begins[first]), int(begins[last])) for first, last in spans)
