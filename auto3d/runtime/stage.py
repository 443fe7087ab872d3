"""One stage as it runs: its piece of the program as a module, and the forward and backward of single micro-batches."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from auto3d.capture.specialize import CapturedModel, is_random
from auto3d.partition.stage import Stage
from auto3d.runtime.randomness import Randomness, SeededOperation


@dataclass
class _InFlight:
    """What a micro-batch's backward needs from its forward."""

    received: list[torch.Tensor]  # leaves of the stage's autograd graph, of this stage alone
    outputs: list[torch.Tensor]


class StageModule:
    """Runs the forward and the backward of one stage, one micro-batch at a time, in any order.

    ``tensors`` holds at least the stage's state, by name, on ``device``; parameters among them collect gradients in
    ``.grad``. A micro-batch's loss counts ``loss_weight``, so that the sum over micro-batches and replicas is the mean.
    """

    def __init__(
        self,
        stage: Stage,
        captured: CapturedModel,
        tensors: Mapping[str, torch.Tensor],
        *,
        loss_weight: float,
        randomness: Randomness,
        device: torch.device,
    ) -> None:
        self.stage = stage
        self.sent = list(dict.fromkeys(transfer.value.name for transfer in stage.sent))
        self.loss = torch.zeros(
            (), dtype=torch.float64, device=device
        )  # weighted sum over an iteration's micro-batches
        self._loss_name = captured.graph.loss if stage.has_loss else None
        self._outputs = list(dict.fromkeys([*self.sent, *([self._loss_name] if stage.has_loss else [])]))
        self._module = _stage_program(stage, captured, self._outputs, randomness, device)
        self._state = [tensors[name] for name in stage.state]
        self._loss_weight = loss_weight
        self._randomness = randomness
        self._in_flight: dict[int, _InFlight] = {}

    def forward(
        self, micro_batch: int, received: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Run ``micro_batch``; returns the values to send, contiguous and free of autograd."""
        self._randomness.micro_batch = micro_batch
        leaves = [
            received[transfer.value.name].detach().requires_grad_(transfer.value.differentiable)
            for transfer in self.stage.received
        ]
        outputs = self._module(*self._state, *leaves, *(inputs[name] for name in self.stage.inputs))
        self._in_flight[micro_batch] = _InFlight(leaves, outputs)
        if self.stage.has_loss:
            self.loss += outputs[self._outputs.index(self._loss_name)].detach() * self._loss_weight
        return {name: output.detach().contiguous() for name, output in zip(self.sent, outputs, strict=False)}

    def backward(self, micro_batch: int, gradients: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Run the backward of ``micro_batch``, given each sent value's gradients from the stages that used it.

        Returns the gradient of every received differentiable value, contiguous; of one that has no influence on the
        loss, zeros.
        """
        in_flight = self._in_flight.pop(micro_batch)
        outputs, output_gradients = [], []
        for name, output in zip(self._outputs, in_flight.outputs, strict=True):
            arrived = list(gradients.get(name, ()))
            if name == self._loss_name:
                arrived.append(torch.full_like(output, self._loss_weight))
            if arrived and output.requires_grad:
                outputs.append(output)
                output_gradients.append(sum(arrived[1:], start=arrived[0]))
        if outputs:
            torch.autograd.backward(outputs, output_gradients)
        return {
            transfer.value.name: leaf.grad.contiguous() if leaf.grad is not None else torch.zeros_like(leaf)
            for transfer, leaf in zip(self.stage.received, in_flight.received, strict=True)
            if leaf.requires_grad
        }


def _stage_program(
    stage: Stage, captured: CapturedModel, outputs: Sequence[str], randomness: Randomness, device: torch.device
) -> fx.GraphModule:
    """A module that takes the stage's state, received values and inputs, in this order, and returns ``outputs``."""
    names = {**captured.exported.parameters, **captured.exported.buffers}
    source = {node.name: node for node in captured.program.nodes}
    graph = fx.Graph()
    state = {name: graph.placeholder(f"state_{position}") for position, name in enumerate(stage.state)}
    env: dict[fx.Node, fx.Node] = {}
    for node in captured.program.find_nodes(op="placeholder"):
        name = names.get(node.name, node.name)
        if name in state:
            env[node] = state[name]
    for position, name in enumerate((*(transfer.value.name for transfer in stage.received), *stage.inputs)):
        env[source[name]] = graph.placeholder(f"given_{position}")

    operation_number = {node.name: number for number, node in enumerate(captured.graph.nodes)}
    own = set(stage.nodes)
    seeded: dict[str, nn.Module] = {}
    for node in captured.program.nodes:
        if node in env:
            continue
        if is_random(node) and node.name in own:
            seeded[node.name] = SeededOperation(node.target, operation_number[node.name], randomness)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = _put_on_device(graph.call_module(node.name, args, kwargs), device)
        elif node.name in own or (node.target is operator.getitem and node.args[0] in env):
            env[node] = _put_on_device(graph.node_copy(node, env.__getitem__), device)
    graph.output([env[source[name]] for name in outputs])
    return fx.GraphModule(seeded, graph)


def _put_on_device(node: fx.Node, device: torch.device) -> fx.Node:
    """The export burned the meta device into operators that make tensors."""
    node.args, node.kwargs = tree_map_only(torch.device, lambda _: device, (node.args, node.kwargs))
    return node
