"""One stage as it runs: its piece of the program as a module, and the forward and backward of single micro-batches."""

import copy
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

    received: list[torch.Tensor]  # leaves of the stage's autograd graph
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
        )  # weighted sum over the micro-batches of an iteration
        self._outputs = [*self.sent, *([captured.graph.loss] if stage.has_loss else [])]
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
        leaves = [received[transfer.value.name] for transfer in self.stage.received]
        for leaf in leaves:
            leaf.requires_grad_(leaf.is_floating_point())
        outputs = self._module(*self._state, *leaves, *(inputs[name] for name in self.stage.inputs))
        self._in_flight[micro_batch] = _InFlight(leaves, outputs)
        if self.stage.has_loss:
            self.loss += outputs[-1].detach() * self._loss_weight
        return {name: output.detach().contiguous() for name, output in zip(self.sent, outputs, strict=False)}

    def backward(self, micro_batch: int, gradients: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Run the backward of ``micro_batch``, given each sent value's gradients from the stages that used it.

        Returns the gradient of every received floating value; of one that has no influence on the loss, zeros.
        """
        in_flight = self._in_flight.pop(micro_batch)
        outputs, output_gradients = [], []
        for name, output in zip(self._outputs, in_flight.outputs, strict=True):
            if not output.requires_grad:
                continue
            if name in gradients:
                outputs.append(output)
                output_gradients.append(sum(gradients[name][1:], start=gradients[name][0]))
            if self.stage.has_loss and output is in_flight.outputs[-1]:
                outputs.append(output)
                output_gradients.append(torch.full_like(output, self._loss_weight))
        if outputs:
            torch.autograd.backward(outputs, output_gradients)
        return {
            transfer.value.name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            for transfer, leaf in zip(self.stage.received, in_flight.received, strict=True)
            if leaf.requires_grad
        }


def _stage_program(
    stage: Stage, captured: CapturedModel, outputs: Sequence[str], randomness: Randomness, device: torch.device
) -> fx.GraphModule:
    """A module that takes the stage's state, received values and inputs, in this order, and returns ``outputs``."""
    exported = captured.exported
    source = {node.name: node for node in captured.program.nodes}
    aliases = {**exported.parameters, **exported.buffers}
    graph = fx.Graph()
    attributes: dict[str, nn.Module] = {}
    env: dict[fx.Node, fx.Node] = {}

    def placeholder(name: str) -> fx.Node:
        return graph.placeholder(name.replace(".", "_"))

    state = {name: placeholder(name) for name in stage.state}
    for node in captured.program.find_nodes(op="placeholder"):
        name = aliases.get(node.name, node.name)
        if name in state:
            env[node] = state[name]
    for name in (*(transfer.value.name for transfer in stage.received), *stage.inputs):
        env[source[name]] = placeholder(name)

    own = set(stage.nodes)
    for node in captured.program.nodes:
        if node in env:
            continue
        if node.op == "get_attr" and any(user.name in own for user in node.users):
            attributes[node.target] = _on_device(exported.submodules[node.target], device)
            env[node] = graph.node_copy(node)
        elif is_random(node) and node.name in own:
            attributes[node.name] = SeededOperation(node.target, captured.graph.producer[node.name], randomness)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = graph.call_module(node.name, args, kwargs)
        elif node.name in own or (node.target is operator.getitem and node.args[0] in env):
            env[node] = _put_on_device(graph.node_copy(node, env.__getitem__), device)
    graph.output([env[source[name]] for name in outputs])
    return fx.GraphModule(attributes, graph)


def _put_on_device(node: fx.Node, device: torch.device) -> fx.Node:
    """The export burned the meta device into operators that make tensors."""
    node.args, node.kwargs = tree_map_only(torch.device, lambda _: device, (node.args, node.kwargs))
    return node


def _on_device(body: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    body = copy.deepcopy(body)
    for node in body.graph.nodes:
        _put_on_device(node, device)
    body.recompile()
    return body
