"""A stage's piece of the captured program as a module that runs: on its device, seeded, and split if asked."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from auto3d.capture.specialize import CapturedModel, is_random
from auto3d.partition.stage import Stage
from auto3d.runtime.constants import fold_constants
from auto3d.runtime.randomness import Randomness, SeededOperation
from auto3d.runtime.weight_gradients import PutOff, SplitOperation, can_be_split


def stage_program(
    stage: Stage,
    captured: CapturedModel,
    outputs: Sequence[str],
    *,
    randomness: Randomness,
    device: torch.device,
    put_off: PutOff | None,
) -> fx.GraphModule:
    """A module that takes the stage's state, received values and inputs, in this order, and returns ``outputs``.

    With ``put_off``, its backward leaves the gradients of weights there, where it can.
    """
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
    trained = {state[name] for name in stage.state if name in captured.graph.parameters}
    modules: dict[str, nn.Module] = {}
    for node in captured.program.nodes:
        if node in env:
            continue
        if node.name not in own and not (node.target is operator.getitem and node.args[0] in env):
            continue
        copy = graph.node_copy(node, env.__getitem__)
        copy.args, copy.kwargs = _on_device((copy.args, copy.kwargs), device)
        if is_random(node):
            modules[node.name] = SeededOperation(node.target, operation_number[node.name], randomness)
        elif put_off is not None and can_be_split(copy, trained):
            modules[node.name] = SplitOperation(node.target, put_off)
        if node.name in modules:
            copy.op, copy.target = "call_module", node.name
        env[node] = copy
    graph.output([env[source[name]] for name in outputs])
    module = fx.GraphModule(modules, graph)
    fold_constants(module)
    return module


def _on_device(arguments: Any, device: torch.device) -> Any:
    """The export burned the meta device into operators that make tensors."""
    return tree_map_only(torch.device, lambda _: device, arguments)
