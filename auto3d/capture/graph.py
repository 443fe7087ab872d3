"""The Graph: a model's operations in order, with the cost of each operation; independent of torch's classes."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

_NORMALISATIONS = ("aten.batch_norm.default", "aten.instance_norm.default")
BATCH_STATISTICS = ("aten.batch_norm.default", "aten._native_batch_norm_legit_functional.default")


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: an operation's result, a graph input, a parameter, a buffer or a constant."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without the module, for example "float32"
    item_bytes: int
    differentiable: bool  # whether it can have a gradient: its dtype is floating-point or complex

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One operation of the model."""

    name: str
    operator: str
    reads: tuple[str, ...]  # names of the values of earlier nodes and of the graph inputs that it reads
    state: tuple[str, ...]  # names of the parameters, buffers and constants that it uses
    outputs: tuple[Value, ...]
    module: str  # path of the module whose code made it, for example "transformer.h.0.attn"
    flops: int  # FLOPs of the forward
    backward_flops: int
    saves: tuple[str, ...]  # values and graph inputs that its backward needs, by the name of the owner of their memory
    saved_bytes: int  # bytes of other tensors that its backward needs, such as a dropout mask
    from_inputs: bool  # cheap to repeat, and depends only on graph inputs, constants and unwritten buffers
    is_view: bool = False  # its results are views of what it reads: it computes and moves nothing
    copies: tuple[str, ...] = ()  # names of the parameters that it uses as a copy in low precision


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A model at one micro-batch size. ``nodes`` are in an order in which they can run.

    The dicts map the name of a value to the value.
    """

    nodes: tuple[GraphNode, ...]
    inputs: dict[str, Value]
    parameters: dict[str, Value]  # under the first name of each parameter: tied parameters appear once
    buffers: dict[str, Value]
    constants: dict[str, Value]  # tensors that forward makes from numbers in the model's code
    trained: frozenset[str]  # names of the parameters that a gradient reaches
    written_buffers: frozenset[str]  # names of the buffers that a forward writes to
    loss: str  # name of the scalar value that training minimises; if it has none, of the first of ``outputs``
    micro_batch_size: int
    fingerprint: str
    """Equal for the same program on the same parameters at the same micro-batch size. A Plan stores the fingerprint of
    the Graph that its stages cut."""
    outputs: dict[str, str] = field(default_factory=dict)  # other results of an evaluation -> name of the value
    precision: str = "float32"  # the precision of torch.autocast; float32: without autocast
    copies: dict[str, Value] = field(default_factory=dict)
    """Name of a parameter -> its copy in low precision, made once per update, which some of ``nodes`` use."""
    producer: dict[str, int] = field(init=False)  # name of a value -> index of the node that makes it

    def __post_init__(self) -> None:
        made = {value.name: index for index, node in enumerate(self.nodes) for value in node.outputs}
        operations = [node.name for node in self.nodes]
        values = [value.name for node in self.nodes for value in node.outputs]
        for names in (operations, values):  # stages, segments and costs refer to them by name
            if len(set(names)) < len(names):
                raise ValueError(f"two operations or values have the name {Counter(names).most_common(1)[0][0]}")
        object.__setattr__(self, "producer", made)

    @cached_property
    def carried_buffers(self) -> frozenset[str]:
        """Written buffers that the loss depends on, so that a micro-batch's result depends on earlier micro-batches.

        The statistics of a batch norm are not among them, since training writes but does not read them.
        """
        carriers: dict[str, set[str]] = {}  # value -> the written buffers that it depends on
        for node in self.nodes:
            entering = set().union(*(carriers.get(name, ()) for name in node.reads))
            if node.operator not in _NORMALISATIONS:
                entering |= self.written_buffers.intersection(node.state)
            if entering:
                carriers.update((value.name, entering) for value in node.outputs)
        return frozenset(carriers.get(self.loss, ()))

    def same_operations(self, other: "Graph") -> bool:
        """Whether the Graphs of a model at two micro-batch sizes have the same operations under the same names.

        Operations that depend only on inputs may differ: at one size, for example, a mask is not expanded.
        """

        def operations(graph: Graph) -> list[tuple]:
            return [
                (node.name, node.operator, node.state, [value.name for value in node.outputs])
                for node in graph.nodes
                if not node.from_inputs
            ]

        return operations(self) == operations(other)

    def value(self, name: str) -> Value:
        """The value ``name`` that a node makes."""
        return next(value for value in self.nodes[self.producer[name]].outputs if value.name == name)
