"""Describe an exported model as a Graph: the cost of each operation, and what autograd keeps of it."""

import operator
from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any

import torch
from torch import fx

from auto3d.capture.export import ExportedModel, is_differentiable, module_path
from auto3d.capture.graph import Graph, GraphNode, Value
from auto3d.capture.in_place import is_mutable
from auto3d.capture.masks import ATTENTION, DROPOUT
from auto3d.capture.nodes import args_of, operands_of, target_of
from auto3d.capture.operation_cost import OperationCosts

CHEAP_FLOPS = 2  # per result element: an outer product of rotary embeddings may be repeated, a matrix product not


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers when it runs."""
    if node.target is ATTENTION:  # torch does not tag it, although it draws if its dropout is above 0
        dropout = node.kwargs.get("dropout_p", node.args[DROPOUT] if len(node.args) > DROPOUT else 0.0)
        return bool(dropout)
    return _draws(target_of(node))


@cache
def _draws(target: Any) -> bool:
    """Whether torch says that the operator draws random numbers."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def describe(exported: ExportedModel, *, fused_attention: bool = True) -> Graph:
    """The Graph of ``exported``, whose nodes have the names of the nodes of its program.

    Without ``fused_attention``, costs are those on a system whose attention is not one kernel, such as Megatron-LM
    before FlashAttention; the program, and so the fingerprint, stays the same.

    As a side effect, the ``val`` of each program node becomes a meta tensor with the strides and ``requires_grad`` that
    the value has in a run.
    """
    state_names = {**exported.parameters, **exported.buffers, **{name: name for name in exported.constants}}
    cost_of = OperationCosts(exported.device, fused_attention=fused_attention)
    nodes: list[GraphNode] = []
    from_inputs: dict[str, bool] = {}
    storage: dict[str, str] = {}  # value -> the value that owns its memory: itself, or the value that it is a view of
    fixed: set[str] = set()  # values that do not depend on data: held once, not for each micro-batch

    def held_once(name: str) -> bool:
        return name in state_names or name in fixed

    for node in exported.program.nodes:
        if node.op == "placeholder":
            varies = node.name in exported.parameters or exported.buffers.get(node.name) in exported.written_buffers
            from_inputs[node.name] = not varies
            storage[node.name] = node.name
            is_trained = exported.parameters.get(node.name) in exported.trained
            node.meta["val"] = _on_meta(node.meta["val"]).requires_grad_(is_trained)
        if node.op != "call_function" or (node.target is operator.getitem and node.args[0].op == "call_function"):
            continue
        sources = node.all_input_nodes
        random, mutable = is_random(node), is_mutable(node)
        if mutable:  # it returns the buffer that it writes to
            state_names[node.name] = state_names[node.args[0].name]
        outputs = _outputs(node)
        if all(source.name in fixed for source in sources) and not random:
            fixed.update((node.name, *(value.name for value in outputs)))
        cost = cost_of(node.target, node.args, node.kwargs, node.meta["val"])
        arguments = [operand.name for operand in operands_of(node)]
        takers = _takers(node)
        saved = [arguments[position] for position in cost.saved_arguments]
        saved_bytes = cost.saved_bytes
        for position, (result, argument) in enumerate(zip(cost.results, cost.alias_of, strict=True)):
            if position in takers:
                taker = takers[position]
                taker.meta["val"] = result
                storage[taker.name] = taker.name if argument is None else storage[arguments[argument]]
            if position in cost.saved_results and position in takers:
                saved.append(takers[position].name)
            elif position in cost.saved_results:
                saved_bytes += result.nbytes
        cheap = cost.flops <= CHEAP_FLOPS * sum(prod(value.shape) for value in outputs)
        repeatable = cheap and not random and all(from_inputs[source.name] for source in sources)
        from_inputs.update(dict.fromkeys((node.name, *(value.name for value in outputs)), repeatable))
        nodes.append(
            GraphNode(
                name=node.name,
                operator=str(node.target),
                reads=tuple(source.name for source in sources if source.name not in state_names),
                state=tuple(dict.fromkeys(state_names[s.name] for s in sources if s.name in state_names)),
                outputs=outputs,
                module=module_path(node),
                flops=cost.flops,
                backward_flops=cost.backward_flops,
                saves=tuple(dict.fromkeys(owner for owner in map(storage.__getitem__, saved) if not held_once(owner))),
                saved_bytes=saved_bytes,
                from_inputs=repeatable,
                copies=tuple(dict.fromkeys(state_names[s.name] for s in sources if s.name in exported.copies)),
                is_view=all(argument is not None for argument in cost.alias_of) and not mutable,
            )
        )
    placeholders = {node.name: node.meta["val"] for node in exported.program.find_nodes(op="placeholder")}

    def named(placeholder_names: Mapping[str, str]) -> dict[str, Value]:
        return {name: _value(name, placeholders[placeholder]) for placeholder, name in placeholder_names.items()}

    return Graph(
        nodes=tuple(nodes),
        inputs=named({name: name for name in exported.inputs}),
        parameters=named({place: name for place, name in exported.parameters.items() if place not in exported.copies}),
        copies=_copies(exported),
        buffers=named(exported.buffers),
        constants=named({name: name for name in exported.constants}),
        trained=exported.trained,
        written_buffers=exported.written_buffers,
        loss=exported.loss,
        outputs=dict(exported.outputs),
        micro_batch_size=exported.micro_batch_size,
        fingerprint=exported.fingerprint,
        precision=exported.precision,
    )


def _copies(exported: ExportedModel) -> dict[str, Value]:
    """Name of a parameter -> its copies in low precision, as one value."""
    copies = [node for node in exported.program.find_nodes(op="placeholder") if node.name in exported.copies]
    named = [(exported.parameters[copy.name], copy.meta["val"]) for copy in copies]
    return {name: _value(name, value) for name, value in named}


def _on_meta(value: torch.Tensor) -> torch.Tensor:
    """A meta tensor like ``value``, a fake tensor of the export that claims to be on another device."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _value(name: str, tensor: torch.Tensor) -> Value:
    return Value(
        name,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        tensor.element_size(),
        is_differentiable(tensor),
    )


def _outputs(node: fx.Node) -> tuple[Value, ...]:
    """The results of the node that are used: its tensor, or each tensor that a user takes out of its tuple."""
    if isinstance(node.meta["val"], torch.Tensor):
        return (_value(node.name, node.meta["val"]),)
    return tuple(
        _value(user.name, user.meta["val"])
        for user in node.users
        if user.target is operator.getitem and isinstance(user.meta["val"], torch.Tensor)
    )


def _takers(node: fx.Node) -> dict[int, fx.Node]:
    """Number of a result among the tensors that ``node`` makes -> the node whose value it is."""
    if isinstance(node.meta["val"], torch.Tensor):
        return {0: node}
    number_of = [index for index, value in enumerate(node.meta["val"]) if isinstance(value, torch.Tensor)]
    return {number_of.index(args_of(user)[1]): user for user in node.users if target_of(user) is operator.getitem}
