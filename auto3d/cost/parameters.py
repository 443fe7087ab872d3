"""The trained parameters of a stage, each with its name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import numpy as np

from auto3d.cost.tables import WorkTables
from auto3d.cost.tensors import Span, Tensors


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
    for number in parameters_in(tensors, local_spans(tensors, operations)):
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


def parameters_in(tensors: Tensors, spans: Sequence[Span]) -> list[int]:
    """The numbers of the trained parameters that operations in ``spans`` of the rank's own positions use, each once."""
    used = (tensors.state_of[slice(*np.searchsorted(tensors.state_at, span))].tolist() for span in spans)
    return list(dict.fromkeys(chain.from_iterable(used)))


def local_spans(tensors: Tensors, spans: Sequence[Span]) -> tuple[Span, ...]:
    """``spans`` of the whole Graph as positions of the operations that a rank runs."""
    if tensors.begins is None:
        return tuple(spans)
    begins = tensors.begins
    return tuple((int(begins[first]), int(begins[last])) for first, last in spans)
