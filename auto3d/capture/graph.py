"""The Graph: a model's operations in order, with what each costs; independent of torch's classes."""

from dataclasses import dataclass, field
from functools import cached_property
from math import prod

_NORMALISATIONS = ("aten.batch_norm.default", "aten.instance_norm.default")


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: an operation's result, a graph input, a parameter or a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without the module: "float32"
    item_bytes: int
    differentiable: bool  # of a floating or complex type: has a gradient

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One operation of the model."""

    name: str
    operator: str
    reads: tuple[str, ...]  # values of earlier nodes, and graph inputs
    state: tuple[str, ...]  # parameters, buffers and constants that it uses
    outputs: tuple[Value, ...]
    module: str  # path of the module that it came from: "transformer.h.0.attn"
    flops: int  # of the forward
    backward_flops: int
    saves: tuple[str, ...]  # values and graph inputs that its backward needs, each by the name of what holds its memory
    saved_bytes: int  # of what else its backward needs, such as a dropout's mask
    from_inputs: bool  # depends on graph inputs, constants and unwritten buffers alone, and is cheap to repeat
    is_view: bool = False  # its results show memory of what it reads: it computes and moves nothing


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A model at one micro-batch size. ``nodes`` are in an order in which they can run."""

    nodes: tuple[GraphNode, ...]
    inputs: dict[str, Value]
    parameters: dict[str, Value]  # by the first name of each: tied parameters appear once
    buffers: dict[str, Value]
    constants: dict[str, Value]  # tensors that the model's code makes from numbers in it
    trained: frozenset[str]  # names of the parameters that a gradient reaches
    written_buffers: frozenset[str]  # names of those that a forward writes to
    loss: str  # the value to be minimised, a scalar
    micro_batch_size: int
    fingerprint: str
    """Equal for the same program on the same parameters at the same micro-batch size: a Plan holds it to know again the
    Graph that its stages cut."""
    producer: dict[str, int] = field(init=False)  # value -> index of the node that makes it

    def __post_init__(self) -> None:
        made = {value.name: index for index, node in enumerate(self.nodes) for value in node.outputs}
        object.__setattr__(self, "producer", made)

    @cached_property
    def carried_buffers(self) -> frozenset[str]:
        """Written buffers whose values enter the loss, so that a micro-batch's result depends on those before it.

        The statistics of a batch norm, which training writes and does not read, are none.
        """
        carriers: dict[str, set[str]] = {}  # value -> the written buffers that enter it
        for node in self.nodes:
            entering = set().union(*(carriers.get(name, ()) for name in node.reads))
            if node.operator not in _NORMALISATIONS:
                entering |= self.written_buffers.intersection(node.state)
            if entering:
                carriers.update((value.name, entering) for value in node.outputs)
        return frozenset(carriers.get(self.loss, ()))

    def same_operations(self, other: "Graph") -> bool:
        """Whether two micro-batch sizes of a model have the same operations under the same names.

        Those that depend on inputs alone need not be the same: at one size, say, a mask is not expanded.
        """

        def operations(graph: Graph) -> list[tuple]:
            return [
                (node.name, node.operator, node.state, [value.name for value in node.outputs])
                for node in graph.nodes
                if not node.from_inputs
            ]

        return operations(self) == operations(other)

    def value(self, name: str) -> Value:
        """The value that a node makes under this name."""
        return next(value for value in self.nodes[self.producer[name]].outputs if value.name == name)
