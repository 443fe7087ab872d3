"""The costs of a Graph's operations on one device: the numbers that partition methods balance."""

from collections.abc import Iterable
from dataclasses import dataclass

from auto3d.capture.graph import Graph


@dataclass(frozen=True, kw_only=True)
class PartitionCosts:
    """Costs of one micro-batch. The tuples have one entry for each operation, by its position in the Graph."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    latency_s: float  # latency of a message from one stage to the next
    bandwidth: float  # bytes per second of such a message
    memory_bytes: float  # memory of one device
    state_factor: float  # bytes of weights, gradients and optimizer state per byte of weights in the Graph
    activation_factor: float = 1.0  # bytes of an activation, kept or sent, per byte that it has in the Graph
    forward_launch_s: tuple[float, ...] | None = None  # host's seconds to launch each operation; None: no time
    backward_launch_s: tuple[float, ...] | None = None
    micro_batch_s: float = 0.0  # host's seconds for each micro-batch of a stage
    handling: tuple[float, float] = (0.0, 0.0)  # compute of a message at each end: seconds, and seconds per byte

    def message_s(self, size: float) -> float:
        """Seconds that a message of ``size`` bytes in the Graph takes; 0 without anything to send."""
        return self.latency_s + self.activation_factor * size / self.bandwidth if size else 0.0


def analytic(
    graph: Graph,
    *,
    flops_per_s: float = 10e12,
    memory_bandwidth: float = 500e9,
    latency_s: float = 10e-6,
    bandwidth: float = 10e9,
    memory_bytes: float = float("inf"),
    state_factor: float = 4.0,  # fp32: weights, gradients, two moments of Adam
) -> PartitionCosts:
    """Roofline costs: an operation takes as long as its arithmetic or its memory traffic, whichever takes longer.

    The defaults are round figures for a data-centre GPU; a partition depends only on their ratios.
    """
    values = {value.name: value.bytes for node in graph.nodes for value in node.outputs}
    for tensors in (graph.inputs, graph.parameters, graph.buffers, graph.constants):
        values |= {name: value.bytes for name, value in tensors.items()}
    forward, backward = [], []
    for node in graph.nodes:
        moved = sum(values.get(name, 0) for name in (*node.reads, *node.state)) + sum(v.bytes for v in node.outputs)
        forward.append(max(node.flops / flops_per_s, moved / memory_bandwidth))
        has_backward = any(value.differentiable for value in node.outputs) and not node.from_inputs
        backward.append(max(node.backward_flops / flops_per_s, 2 * moved / memory_bandwidth) if has_backward else 0.0)
    return PartitionCosts(
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        latency_s=latency_s,
        bandwidth=bandwidth,
        memory_bytes=memory_bytes,
        state_factor=state_factor,
    )


def parameter_bytes(graph: Graph, positions: Iterable[int]) -> int:
    """Bytes of all parameters that the operations at ``positions`` use, each counted once."""
    names = {name for position in positions for name in graph.nodes[position].state}
    return sum(graph.parameters[name].bytes for name in names & graph.parameters.keys())


def saved_bytes(graph: Graph, positions: Iterable[int]) -> int:
    """Bytes that autograd keeps of one micro-batch for the operations at ``positions``, each tensor counted once."""
    nodes = [graph.nodes[position] for position in positions]
    kept = {name for node in nodes for name in node.saves}
    internal = sum(node.saved_bytes for node in nodes)
    return internal + sum((graph.inputs[name] if name in graph.inputs else graph.value(name)).bytes for name in kept)
