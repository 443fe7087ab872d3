"""Rewrite an exported program so that it may be cut anywhere: no regions, and no writes but those to buffers."""

import operator
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from auto3d.capture.errors import CaptureError, node_line

_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_SCATTER = {  # view -> operator that gives the whole with the view's part replaced
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}
_NORMALISATIONS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)


def inline_regions(module: fx.GraphModule, buffers: Collection[str]) -> None:
    """Put the operations of each region without gradient in the place of its call, on detached values.

    ``buffers`` are not detached: they have no gradient, and a region may write to them. Raises CaptureError where there
    is another kind of region: a loop, a branch, or automatic mixed precision.
    """
    program = module.graph
    for node in [node for node in program.nodes if isinstance(node.target, torch._ops.HigherOrderOperator)]:
        with program.inserting_before(node):
            results = _inline(node, {argument: argument for argument in node.all_input_nodes}, module, program, buffers)
        for user in list(node.users):  # each takes one result out
            user.replace_all_uses_with(results[user.args[1]])
            program.erase_node(user)
        program.erase_node(node)
    for node in program.find_nodes(op="get_attr"):
        program.erase_node(node)


def _inline(
    region: fx.Node, outer: dict[fx.Node, Any], owner: fx.GraphModule, program: fx.Graph, buffers: Collection[str]
) -> tuple[Any, ...]:
    """Copy a region's operations to where ``program`` inserts; ``outer`` maps what the region reads to its nodes."""
    if region.target is _SET_GRAD:
        with_gradient, body, *arguments = region.args
    elif region.target is _AUTOCAST and not region.args[2]:
        with_gradient, body, arguments = True, region.args[4], region.args[5:]
    else:
        bodies = [owner.get_submodule(n.target).graph.nodes for n in region.all_input_nodes if n.op == "get_attr"]
        line = next((node_line(node) for nodes in bodies for node in nodes if node_line(node)), "")
        raise CaptureError(f"{region.target} cannot be cut into operations{line}; the model must do without it there")
    inner = owner.get_submodule(body.target)
    values: dict[fx.Node, Any] = {}
    for placeholder, argument in zip(inner.graph.find_nodes(op="placeholder"), arguments, strict=True):
        value = outer[argument] if isinstance(argument, fx.Node) else argument
        if not with_gradient and isinstance(value, fx.Node) and value.name not in buffers and _is_tensor(value):
            detached = program.call_function(torch.ops.aten.detach.default, (value,))
            detached.meta = {**region.meta, "val": value.meta["val"]}
            value = detached
        values[placeholder] = value
    for node in inner.graph.nodes:
        if node.op == "output":
            return fx.node.map_arg(tuple(node.args[0]), values.__getitem__)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            values[node] = _inline(node, values, inner, program, buffers)
        elif node.target is operator.getitem and isinstance(values[node.args[0]], tuple):  # of a region in the region
            values[node] = values[node.args[0]][node.args[1]]
        elif node.op == "call_function":
            values[node] = program.node_copy(node, values.__getitem__)
    raise AssertionError("a graph ends with its output")


def remove_in_place(program: fx.Graph, buffers: Collection[str]) -> None:
    """Write in-place operators on fresh values out of place, through slices of them too.

    Those on ``buffers`` (batch statistics, moving averages) stay, for a buffer lives on one stage; who reads such a
    buffer gets a copy, since the next micro-batch may write to it before this one's backward. Raises CaptureError for a
    write that another tensor would see.
    """
    position = {node: index for index, node in enumerate(program.nodes)}
    aliases = set(buffers)  # nodes that are a buffer itself
    for node in list(program.nodes):
        if not is_mutable(node):
            continue
        if node.args[0].name in aliases:
            aliases.add(node.name)
            continue
        for old, new in _write_out_of_place(program, node, position).items():
            for user in list(old.users):
                if position[user] > position[node]:
                    user.replace_input_with(old, new)
    written_names = written_buffers(program, buffers)
    for node in list(program.nodes):
        if node.name in written_names or (is_mutable(node) and node.name in aliases):
            _copy_for_readers(program, node)


def _write_out_of_place(program: fx.Graph, node: fx.Node, position: dict[fx.Node, int]) -> dict[fx.Node, fx.Node]:
    """Make ``node`` an operator that writes nothing; returns what later operators must use in the place of what."""
    written = node.args[0]
    chain = [written]  # what is written to, what that is a slice of, and so on
    while chain[-1].target in _SCATTER:
        chain.append(chain[-1].args[0])
    _check_out_of_place(node, chain, position)

    def insert(target: Any, *args: Any, like: fx.Node, after: fx.Node, **kwargs: Any) -> fx.Node:
        with program.inserting_after(after):
            made = program.call_function(target, args, kwargs)
        made.meta = {**node.meta, "val": like.meta["val"]}
        position[made] = position[node]
        return made

    new = {}
    value = node
    is_copy = node.target is torch.ops.aten.copy_.default
    if is_copy:  # whose other form has no derivative
        node.target, node.args = torch.ops.aten.expand_as.default, (node.args[1], written)
    else:
        node.target = _out_of_place(node.target)
    if is_copy or any(_is_tensor(other) and _dtype(other) != _dtype(written) for other in node.all_input_nodes):
        # in place the type stays; out of place it would be the wider one
        value = insert(torch.ops.aten._to_copy.default, node, dtype=_dtype(written), like=written, after=node)
        new[node] = value
    new[written] = value
    for view, whole in pairwise(chain):
        value = insert(_SCATTER[view.target], whole, value, *view.args[1:], like=whole, after=value)
        new[whole] = value
    return new


def written_buffers(program: fx.Graph, buffers: Collection[str]) -> set[str]:
    """The placeholders among ``buffers`` that an operation of ``program`` writes to."""
    first = {name: name for name in buffers}  # a node that is a buffer -> its placeholder
    for node in program.nodes:
        if is_mutable(node) and node.args[0].name in first:
            first[node.name] = first[node.args[0].name]
    chained = {first[name] for name in first if name != first[name]}
    normalised = {
        argument.name
        for node in program.nodes
        if _writes_statistics(node)
        for argument in node.all_input_nodes
        if argument.name in buffers
    }
    return chained | normalised


def _copy_for_readers(program: fx.Graph, buffer: fx.Node) -> None:
    for user in list(buffer.users):
        if _writes_statistics(user) or user.op == "output":
            continue
        with program.inserting_before(user):
            copy = program.call_function(torch.ops.aten.clone.default, (buffer,))
        copy.meta = {**user.meta, "val": buffer.meta["val"]}
        kept = user.args[:1] if is_mutable(user) else ()
        rest = fx.node.map_arg((user.args[len(kept) :], user.kwargs), lambda n, copy=copy: copy if n is buffer else n)
        user.args, user.kwargs = (*kept, *rest[0]), rest[1]
        if not copy.users:
            program.erase_node(copy)


def _check_out_of_place(node: fx.Node, chain: Sequence[fx.Node], position: dict[fx.Node, int]) -> None:
    arguments = node.target._schema.arguments
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments[1:]):
        raise CaptureError(f"{node.target} writes to more than one tensor{node_line(node)}; use another form there")
    if _out_of_place(node.target) is None:
        raise CaptureError(f"{node.target} writes in place and has no other form{node_line(node)}")
    if chain[-1].op == "placeholder":
        raise CaptureError(
            f"{node.target} writes in place to a parameter, a buffer's part or an input of the model{node_line(node)}; "
            "write to a copy there, or use the out-of-place form"
        )
    others = [user for old in chain for user in old.users if user not in chain and position[user] < position[node]]
    if _is_view(chain[-1]) or any(_is_view(other) and _used_after(other, node, position) for other in others):
        raise CaptureError(
            f"{node.target} writes in place to a tensor that has other views{node_line(node)}; "
            "use the out-of-place form there"
        )


def _used_after(view: fx.Node, node: fx.Node, position: dict[fx.Node, int]) -> bool:
    """Whether anything after ``node`` uses ``view``, or a view of it."""
    return any(
        position[user] > position[node] or (_is_view(user) and _used_after(user, node, position)) for user in view.users
    )


def _out_of_place(target: Any) -> Any:
    namespace, name = target.namespace, target._schema.name.split("::")[1].removesuffix("_")
    return getattr(getattr(getattr(torch.ops, namespace), name, None), target._overloadname, None)


def is_mutable(node: fx.Node) -> bool:
    """Whether the operator writes to its first argument, and returns it."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    if node.target.overloadpacket is torch.ops.aten.to and _dtype(node) != _dtype(node.args[0]):
        return False  # it says that it may be a view, and is one only where it changes nothing
    return any(result.alias_info is not None for result in node.target._schema.returns)


def _writes_statistics(node: fx.Node) -> bool:
    """A batch norm in training writes its running statistics, though its schema does not say so."""
    return node.target in _NORMALISATIONS and bool(node.args[5])


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype
