"""The tensors of a Graph as arrays: when each tensor is made, used and saved, and when its gradient exists.

A view counts as the tensor whose memory it shows. Autograd passes the gradients of views and of
sums on without a copy. Values that share a gradient form a class.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from auto3d.capture.graph import Graph, GraphNode
from auto3d.conversions import conversion_of

Span = tuple[int, int]  # positions of operations: the first, and the one after the last
WITH_EARLIER = "auto3d.with_earlier.default"  # joins the keys or the values of all slices so far
# Operators whose backward returns the gradient of the result as the gradient of each operand of the same shape.
_PASSES_GRADIENT = ("aten.add.Tensor", "aten.add_.Tensor", "aten.alias.default", "aten.dropout.default")
_TRANSPOSES = ("aten.transpose", "aten.permute", "aten.t.", "aten.swapaxes", "aten.movedim", "aten.expand")
_IN_ORDER = ("aten.contiguous", "aten.reshape")  # they are views only of what is in order
_ELEMENTWISE = ("aten.add.", "aten.mul.", "aten.sub.", "aten.div.", "aten.neg.", "aten.to.", "aten.gelu.", "aten.silu.")


@dataclass(frozen=True, kw_only=True, eq=False)
class Tensors:
    """Arrays over the memories, the values and the parameters of one Graph; bytes are in the precision of training.

    Positions count the Graph's operations. ``use_*``, ``save_*``, ``read_*`` and ``state_*`` list pairs of an
    operation's position and a number, in the order of positions.
    """

    operations: tuple[str, ...]  # module and operator of each operation
    names: tuple[str, ...]  # name of the value that owns each memory
    size: np.ndarray  # bytes of each memory
    maker: np.ndarray  # position of the operation that makes it; -1 for an input of the model
    repeated: np.ndarray  # whether each stage that uses it makes it again, as it depends on inputs of the model alone
    use_at: np.ndarray
    use_of: np.ndarray  # memory that the operation reads
    use_view: np.ndarray
    """Position of the operation that made the value through which it reads the memory, where the value's elements are
    in another order than its shape says: another stage gets a copy of it in a message, and lays it out anew. Else -1.
    """
    use_size: np.ndarray  # bytes of that value
    save_at: np.ndarray
    save_of: np.ndarray  # memory that the operation saves for its backward
    value_size: np.ndarray  # bytes of each value that has a gradient
    value_maker: np.ndarray
    value_class: np.ndarray  # number of the class of its gradient
    value_memory: np.ndarray
    read_at: np.ndarray
    read_of: np.ndarray  # value that the operation reads
    read_passes: np.ndarray  # whether the operation passes the gradient of its result on to the value
    state_at: np.ndarray
    state_of: np.ndarray  # trained parameter that the operation uses
    state_deferred: np.ndarray  # whether a split backward computes its gradient in the weight half
    parameters: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # shape of each trained parameter
    gradient: np.ndarray  # bytes of the gradient of each trained parameter
    low_gradient: np.ndarray  # bytes of the gradient of its copy in low precision, before it is cast
    deferred_at: np.ndarray
    deferred_of: np.ndarray  # memory that a split backward keeps for the weight half
    deferred_gradient: np.ndarray  # per operation: bytes of gradients of results that it keeps for the weight half
    extra: np.ndarray  # per operation: bytes that it saves beside the memories that it is the first to save
    forward_extra: np.ndarray  # per operation: temporaries of its forward beside what it reads and makes
    backward_extra: np.ndarray  # per operation: temporaries of its backward beside gradients
    slice_gradient: np.ndarray
    """Per operation, for a slice of the sequence: bytes of the gradient of its keys or values, which later slices make
    and which exists until its own backward."""
    joins: np.ndarray  # per operation: whether it joins keys or values, which the stage keeps for later slices
    begins: np.ndarray | None = None
    """Position in the whole Graph -> position here, for a share of the model; None where both are the same."""

    @property
    def count(self) -> int:
        """The number of operations."""
        return len(self.forward_extra)

    @cached_property
    def first_saved(self) -> np.ndarray:
        """Per operation, bytes of the memories that no earlier operation saves."""
        first = np.full(len(self.size), -1)
        first[self.save_of[::-1]] = self.save_at[::-1]
        saved = first >= 0
        return np.bincount(first[saved], self.size[saved], minlength=self.count)

    @cached_property
    def views(self) -> np.ndarray:
        """The numbers of the pairs ``use_*`` that read a view in another order."""
        return np.flatnonzero(self.use_view >= 0)

    @cached_property
    def last_use(self) -> np.ndarray:
        """Position of the last operation that reads each memory; -1 if none does."""
        last = np.full(len(self.size), -1)
        last[self.use_of] = self.use_at
        return last

    @cached_property
    def last_read(self) -> np.ndarray:
        """Position of the last operation that reads each value; -1 if none does."""
        last = np.full(len(self.value_size), -1)
        last[self.read_of] = self.read_at
        return last

    @cached_property
    def with_gradient(self) -> frozenset[int]:
        """The memories whose values have gradients."""
        return frozenset(self.value_memory.tolist())

    @cached_property
    def several(self) -> frozenset[int]:
        """The trained parameters that several operations use."""
        return frozenset(np.flatnonzero(np.bincount(self.state_of, minlength=1) > 1).tolist())

    def whole_position(self, position: int) -> int:
        """The position in the whole Graph of the operation at ``position`` here."""
        return position if self.begins is None else int(np.searchsorted(self.begins, position, side="right")) - 1

    def scaled(self, times: float) -> "Tensors":
        """The same at ``times`` as many samples."""
        grown = (
            "size", "use_size", "value_size", "deferred_gradient", "extra", "forward_extra", "backward_extra",
            "slice_gradient",
        )  # fmt: skip
        return replace(self, **{name: times * getattr(self, name) for name in grown})


def tensors_of(graph: Graph, scale: float, saved: np.ndarray) -> Tensors:
    """The tensors of ``graph``, whose bytes times ``scale`` are its bytes in training.

    ``saved`` has the bytes of activations that each operation is the first to save, as ``Work`` has them.
    """
    owner: dict[str, str] = {}
    names: list[str] = []
    size: list[float] = []
    maker: list[int] = []
    repeated: list[bool] = []
    number: dict[str, int] = {}
    shapes = {name: value.shape for name, value in graph.inputs.items()}

    def add(name: str, nbytes: float, position: int, again: bool) -> None:
        number[name] = len(names)
        owner[name] = name
        names.append(name)
        size.append(scale * nbytes)
        maker.append(position)
        repeated.append(again)

    for name, value in graph.inputs.items():
        add(name, value.bytes, -1, True)
    values: dict[str, int] = {}
    value_size: list[float] = []
    value_maker: list[int] = []
    value_memory: list[int] = []
    classes: list[int] = []
    uses: list[tuple[int, int, int, float]] = []
    transposed: dict[str, tuple[int, float]] = {}  # value in another order than its shape says -> (position, bytes)
    saves: list[tuple[int, int]] = []
    reads: list[tuple[int, int, bool]] = []
    states: list[tuple[int, int, bool]] = []
    deferred: list[tuple[int, int]] = []
    parameters = {name: index for index, name in enumerate(sorted(graph.trained & graph.parameters.keys()))}
    count = len(graph.nodes)
    deferred_gradient, forward_extra, backward_extra = np.zeros(count), np.zeros(count), np.zeros(count)
    slice_gradient, joins = np.zeros(count), np.zeros(count, dtype=bool)
    joined: dict[str, float] = {}  # keys or values of all slices so far -> bytes
    for position, node in enumerate(graph.nodes):
        for name in node.reads:
            if name in owner:
                uses.append((position, number[owner[name]], *transposed.get(name, (-1, 0.0))))
        view = _is_view(node)
        source = next((owner[name] for name in node.reads if name in owner), None) if view else None
        of_state = view and source is None  # a view of a parameter or a constant
        for value in node.outputs:
            shapes[value.name] = value.shape
            reorders = view and node.operator.startswith(_TRANSPOSES)
            reorders |= any(name in transposed for name in node.reads[:1]) and _keeps_order(node, view)
            if reorders and not of_state:
                transposed[value.name] = position, scale * value.bytes
            if source is not None:
                owner[value.name] = source
            elif not of_state:
                add(value.name, value.bytes, position, node.from_inputs)
            if value.differentiable and not node.from_inputs and not of_state:
                values[value.name] = len(value_size)
                classes.append(len(value_size))
                value_size.append(scale * value.bytes)
                value_maker.append(position)
                value_memory.append(number[owner[value.name]])
        for name in node.saves:
            saves.append((position, number[owner.get(name, name)]))
        for name in node.reads:
            if name in values:
                passes = _passes(node, shapes[name])
                reads.append((position, values[name], passes))
                if passes and node.outputs[0].name in values:
                    _join(classes, values[node.outputs[0].name], values[name])
        splits = node.backward_flops > 0 and any(name in graph.parameters for name in node.state)
        for name in node.state:
            if name in parameters:
                states.append((position, parameters[name], splits))
        if splits:
            deferred += [(position, number[owner[name]]) for name in node.reads if name in owner]
            deferred_gradient[position] = scale * sum(value.bytes for value in node.outputs)
        forward_extra[position], backward_extra[position] = (
            scale * nbytes for nbytes in _temporaries(graph, node, shapes)
        )
        backward_extra[position] += sum(joined.get(name, 0.0) for name in node.reads)  # the backward joins them again
        if node.operator == WITH_EARLIER:
            joins[position] = True
            (value,) = node.outputs
            joined[value.name] = scale * value.bytes
            slice_gradient[position] = scale * prod(shapes[node.reads[0]]) * value.item_bytes * value.differentiable

    def column(pairs: Sequence[tuple], place: int, kind: type = int) -> np.ndarray:
        return np.array([pair[place] for pair in pairs], dtype=kind)

    def gradients(sizes: Mapping[str, int]) -> np.ndarray:
        return np.array([float(sizes.get(name, 0)) for name in parameters])

    tensors = Tensors(
        operations=tuple(f"{node.module or node.name} ({node.operator})" for node in graph.nodes),
        names=tuple(names),
        size=np.array(size, dtype=float),
        maker=np.array(maker, dtype=int),
        repeated=np.array(repeated, dtype=bool),
        use_at=column(uses, 0),
        use_of=column(uses, 1),
        use_view=column(uses, 2),
        use_size=column(uses, 3, float),
        save_at=column(saves, 0),
        save_of=column(saves, 1),
        value_size=np.array(value_size, dtype=float),
        value_maker=np.array(value_maker, dtype=int),
        value_class=np.array([_root(classes, index) for index in range(len(classes))], dtype=int),
        value_memory=np.array(value_memory, dtype=int),
        read_at=column(reads, 0),
        read_of=column(reads, 1),
        read_passes=column(reads, 2, bool),
        state_at=column(states, 0),
        state_of=column(states, 1),
        state_deferred=column(states, 2, bool),
        parameters=tuple(parameters),
        shapes=tuple(graph.parameters[name].shape for name in parameters),
        gradient=scale * gradients({name: graph.parameters[name].bytes for name in parameters}),
        low_gradient=scale * gradients({name: value.bytes for name, value in graph.copies.items()}),
        deferred_at=column(deferred, 0),
        deferred_of=column(deferred, 1),
        deferred_gradient=deferred_gradient,
        forward_extra=forward_extra,
        backward_extra=backward_extra,
        slice_gradient=slice_gradient,
        joins=joins,
        extra=np.zeros(count),
    )
    return replace(tensors, extra=saved - tensors.first_saved)


def tensors_of_layers(saved: np.ndarray, outputs: np.ndarray) -> Tensors:
    """The tensors of a model that is known by its layers: each saves ``saved`` bytes and makes a tensor for the
    next."""
    count = len(saved)
    layers, none = np.arange(count), np.zeros(0, dtype=int)
    return Tensors(
        operations=tuple(f"layer {number}" for number in layers),
        names=tuple(f"output of layer {number}" for number in layers),
        size=outputs,
        maker=layers,
        repeated=np.zeros(count, dtype=bool),
        use_at=layers[1:],
        use_of=layers[:-1],
        use_view=np.full(max(0, count - 1), -1),
        use_size=np.zeros(max(0, count - 1)),
        save_at=none,
        save_of=none,
        value_size=outputs,
        value_maker=layers,
        value_class=layers,
        value_memory=layers,
        read_at=layers[1:],
        read_of=layers[:-1],
        read_passes=np.zeros(max(0, count - 1), dtype=bool),
        state_at=none,
        state_of=none,
        state_deferred=none.astype(bool),
        parameters=(),
        shapes=(),
        gradient=np.zeros(0),
        low_gradient=np.zeros(0),
        deferred_at=none,
        deferred_of=none,
        deferred_gradient=saved,
        extra=saved,
        forward_extra=np.zeros(count),
        backward_extra=np.zeros(count),
        slice_gradient=np.zeros(count),
        joins=np.zeros(count, dtype=bool),
    )


def _passes(node: GraphNode, shape: tuple[int, ...]) -> bool:
    """Whether the gradients of the result of ``node`` and of its operand of this shape share their memory."""
    if len(node.outputs) != 1:
        return False
    if _is_view(node):
        return prod(node.outputs[0].shape) == prod(shape)
    if (conversion := conversion_of(node.operator)) is not None:
        return conversion.backward is None and node.outputs[0].shape == shape
    return node.operator in _PASSES_GRADIENT and node.outputs[0].shape == shape


def _keeps_order(node: GraphNode, view: bool) -> bool:
    """Whether the result has the order of the first operand's elements in memory."""
    return node.operator.startswith(_ELEMENTWISE) or (view and not node.operator.startswith(_IN_ORDER))


def _is_view(node: GraphNode) -> bool:
    """Whether the results show the memory of an operand: a conversion that exchanges nothing forward returns it."""
    conversion = conversion_of(node.operator)
    return node.is_view or (conversion is not None and conversion.name == "copy")


def _temporaries(graph: Graph, node: GraphNode, shapes: Mapping[str, tuple[int, ...]]) -> tuple[float, float]:
    """Bytes that the forward and the backward of ``node`` allocate beside operands, results and their gradients."""
    operator = node.operator
    if operator == "aten.cross_entropy_loss.default":
        return 0.0, float(node.saved_bytes)  # the gradient of the log-softmax, as large as what the forward saved
    if operator == "aten.scaled_dot_product_attention.default":
        query, key = (shapes[name] for name in node.reads[:2])
        item = node.outputs[0].item_bytes
        matrix = prod(query[:-1]) * key[-2] * item
        if node.saved_bytes >= matrix:  # not one kernel: gradients of its matrix of weights, before and after softmax
            return 0.0, float(max(matrix, 2 * matrix - (prod(query) + prod(key)) * item))
    return 0.0, 0.0


def _root(classes: list[int], index: int) -> int:
    while classes[index] != index:
        classes[index] = classes[classes[index]]
        index = classes[index]
    return index


def _join(classes: list[int], first: int, second: int) -> None:
    first, second = _root(classes, first), _root(classes, second)
    classes[max(first, second)] = min(first, second)
