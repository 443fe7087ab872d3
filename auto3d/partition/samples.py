"""The dimension of the samples in each value of a Graph, so that a value can be split by samples."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

from auto3d.capture.graph import Graph, GraphNode, Value
from auto3d.partition.stage import Stage
from auto3d.plan import PlanError
from auto3d.words import counted

_RESHAPES = frozenset(
    f"aten.{name}"
    for name in ("view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "unflatten.int")
)
_REORDERING = ("aten.index", "aten.sort", "aten.argsort", "aten.topk", "aten.flip", "aten.roll", "aten.repeat")


@dataclass(frozen=True, slots=True)
class _Layout:
    """The samples lie along ``dimension``, with ``per_sample`` of its elements for one sample.

    ``outer`` counts how often the dimension runs through all samples: once in [batch * sequence], but as often as the
    sequence is long in [sequence * batch], where a slice of the dimension is not a slice of the samples.
    """

    dimension: int
    per_sample: int
    outer: int


def sample_dimensions(graph: Graph, smaller: Graph, halved: Collection[str] = ()) -> dict[str, int]:
    """Name of a value -> the dimension along which equal slices hold equally many samples, in order.

    ``smaller`` is the same model at a smaller micro-batch size: a dimension of samples grows with that size. Values
    without such a dimension, with several, or with the samples in another order are left out. The values ``halved``
    have half of the samples.
    """
    layouts: dict[str, _Layout] = {
        name: _Layout(0, 1, 1) for name, value in graph.inputs.items() if value.shape != smaller.inputs[name].shape
    }
    shapes = {name: value.shape for name, value in graph.inputs.items()}
    small_values = {value.name: value for node in smaller.nodes for value in node.outputs}
    for node in graph.nodes:
        for value in node.outputs:
            shapes[value.name] = value.shape
            if value.name not in small_values:
                continue
            parts = 2 if value.name in halved else 1
            sizes = graph.micro_batch_size // parts, smaller.micro_batch_size // parts
            growing = _growing(value, small_values[value.name], *sizes)
            if growing is None:
                continue
            dimension, per_sample = growing
            outer = _outer(node, value, dimension, per_sample, layouts, shapes)
            if outer is not None:
                layouts[value.name] = _Layout(dimension, per_sample, outer)
    return {name: layout.dimension for name, layout in layouts.items() if layout.outer == 1}


def dimensions_between_replicas(
    stages: Sequence[Stage], replicas: Sequence[int], graph: Graph, smaller: Graph, *, halved: Collection[str] = ()
) -> dict[str, int]:
    """Value -> its dimension of samples, for values that cross between ``stages`` with other numbers of ``replicas``.

    ``smaller`` and ``halved`` are as in ``sample_dimensions``. A value made from weights alone, of which all replicas
    have the same copy, is left out. Raises PlanError for a value that is neither.
    """
    dimensions, from_samples = sample_dimensions(graph, smaller, halved), made_from_samples(graph)
    crossing: dict[str, int] = {}
    for transfer in chain.from_iterable(stage.received for stage in stages):
        name, here, there = transfer.value.name, replicas[transfer.source], replicas[transfer.target]
        if here == there:
            continue
        same_copy = name not in from_samples and transfer.value.shape == smaller.value(name).shape
        if name not in dimensions and not same_copy:
            raise PlanError(
                f"stages: {transfer.source} has {counted(here, 'replica')} and sends {name}, of shape "
                f"{list(transfer.value.shape)}, to stage {transfer.target} with {counted(there, 'replica')}; it "
                "cannot be split by samples, so both must have equally many"
            )
        if name in dimensions:
            crossing[name] = dimensions[name]
    return crossing


def made_from_samples(graph: Graph) -> frozenset[str]:
    """Names of the values that depend on the model's inputs, or on a buffer that the model updates from its inputs."""
    names = set(graph.inputs)
    for node in graph.nodes:
        if not names.isdisjoint(node.reads) or not graph.written_buffers.isdisjoint(node.state):
            names.update((node.name, *(value.name for value in node.outputs)))
    return frozenset(names)


def _growing(value: Value, small: Value, size: int, small_size: int) -> tuple[int, int] | None:
    """(dimension, elements per sample) of the dimension that alone grows with the micro-batch size; else None."""
    if len(value.shape) != len(small.shape):
        return None
    pairs = enumerate(zip(value.shape, small.shape, strict=True))
    different = [(dimension, here, there) for dimension, (here, there) in pairs if here != there]
    if len(different) != 1:
        return None
    dimension, here, there = different[0]
    per_sample = here // size
    return (dimension, per_sample) if (here, there) == (per_sample * size, per_sample * small_size) else None


def _outer(
    node: GraphNode,
    value: Value,
    dimension: int,
    per_sample: int,
    layouts: dict[str, _Layout],
    shapes: dict[str, tuple[int, ...]],
) -> int | None:
    """``_Layout.outer`` of the new value, from the values that ``node`` reads; None where they do not determine it."""
    read = [(layouts[name], shapes[name]) for name in node.reads if name in layouts]
    if node.operator in _RESHAPES:  # a reshape keeps all elements in their order
        if not read or 0 in value.shape:
            return None
        layout, shape = read[0]
        before, now_before = layout.outer * prod(shape[: layout.dimension]), prod(value.shape[:dimension])
        outer, rest = divmod(before, now_before)
        return outer if rest == 0 and outer > 0 and per_sample % outer == 0 else None
    if per_sample == 1:
        return 1
    if node.operator.startswith(_REORDERING):
        return None
    outers = {layout.outer for layout, _ in read if layout.per_sample == per_sample}
    return outers.pop() if len(outers) == 1 else None
