"""What the operations of a Graph cost one device: the numbers that partitioners balance, wherever they come from."""

from collections.abc import Iterable
from dataclasses import dataclass

from auto3d.capture.graph import Graph


@dataclass(frozen=True, kw_only=True)
class PartitionCosts:
    """Costs of one micro-batch, by the position of an operation in the Graph; measured profiles give the same form."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    latency_s: float  # of a message from one stage to the next
    bandwidth: float  # of it, bytes per second
    memory_bytes: float  # of one device
    state_factor: float  # bytes of weights, gradients and optimizer state per byte of weights in the Graph
    activation_factor: float = 1.0  # bytes of an activation, kept or sent, per byte of it in the Graph

    def message_s(self, size: float) -> float:
        """Seconds for a message that has ``size`` bytes in the Graph; none is sent where there is nothing to send."""
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
    """A roofline: an operation takes as long as its arithmetic, or as what it reads and writes, whichever is longer.

    The defaults are round figures of a data-centre GPU; a partition depends on their ratios alone.
    """
    values = {value.name: value.bytes for node in graph.nodes for value in node.outputs}
    for given in (graph.inputs, graph.parameters, graph.buffers, graph.constants):
        values |= {name: value.bytes for name, value in given.items()}
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
    """Of all parameters that the operations at ``positions`` use, each once."""
    names = {name for position in positions for name in graph.nodes[position].state}
    return sum(graph.parameters[name].bytes for name in names & graph.parameters.keys())


def saved_bytes(graph: Graph, positions: Iterable[int]) -> int:
    """Of all that autograd keeps of one micro-batch for the operations at ``positions``, each tensor once."""
    nodes = [graph.nodes[position] for position in positions]
    kept = {name for node in nodes for name in node.saves}
    internal = sum(node.saved_bytes for node in nodes)
    return internal + sum((graph.inputs[name] if name in graph.inputs else graph.value(name)).bytes for name in kept)
