"""Replace the regions of a program by their operations, rewritten to mean the same outside of the region.

A region is code that torch.export keeps together: code without gradient, code under automatic mixed precision, and code
that torch.vmap runs for all samples at once.
"""

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch._functorch import predispatch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from auto3d.capture.autocast import TO_COPY, Autocast
from auto3d.capture.errors import CaptureError, node_line
from auto3d.capture.expand import MARKS
from auto3d.capture.in_place import name_of
from auto3d.capture.nodes import args_of, is_tensor, target_of

_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def inline_regions(
    module: fx.GraphModule, mode: FakeTensorMode, parameters: Collection[str], precision: Autocast | None = None
) -> None:
    """Inline the regions of ``module``: detached values without gradient, casts for mixed precision, batched operators.

    With ``precision``, all of the program was traced under automatic mixed precision and is rewritten with its casts.

    A value without gradient, such as a buffer, is not detached, since a region may write to it. Raises CaptureError for
    another kind of region, such as a loop or a branch.
    """
    _find_lost_users(module)
    program = module.graph
    inliner = _Inliner(program, mode, parameters)
    if precision is not None:
        for node in list(program.nodes):
            inliner.without_autocast(node, precision)
    for node in [node for node in program.nodes if isinstance(node.target, torch._ops.HigherOrderOperator)]:
        with program.inserting_before(node):
            results = inliner.inline(node, {argument: argument for argument in node.all_input_nodes}, module, precision)
        _replace_results(node, results)
    for node in program.find_nodes(op="get_attr"):
        program.erase_node(node)
    _batch(program, mode)


def _find_lost_users(module: fx.GraphModule) -> None:
    """Enter each node among the users of the nodes that it uses.

    Where torch.export inlines code between two regions that has one result, it forgets who uses that result there.
    """
    for submodule in module.modules():
        if isinstance(submodule, fx.GraphModule):
            for node in submodule.graph.nodes:
                for used in node.all_input_nodes:
                    used.users.setdefault(node)


class _Inliner:
    """Copies operations of regions to the insertion point of the program."""

    def __init__(self, program: fx.Graph, mode: FakeTensorMode, parameters: Collection[str]) -> None:
        self._program, self._mode, self._parameters = program, mode, parameters
        self._learns: dict[fx.Node, bool] = {}  # whether the node's value depends on a parameter

    def inline(
        self,
        region: fx.Node,
        outer: Mapping[fx.Node, Any],
        owner: fx.GraphModule,
        precision: Autocast | None = None,
    ) -> tuple[Any, ...]:
        """Copy the operations of ``region`` and return its results; ``outer`` has the values that it reads."""
        with_gradient: Any = True
        if region.target is _SET_GRAD:
            with_gradient, body, *arguments = args_of(region)
        elif region.target is _AUTOCAST:
            # The fourth argument is the cache setting, which the export itself switches off.
            device_type, dtype, enabled, _, body, *arguments = args_of(region)
            if not enabled:
                precision = None
            elif precision is None or precision.kind != (device_type, dtype):
                precision = Autocast(device_type, dtype)
        else:
            bodies = [_body(owner, n).graph.nodes for n in region.all_input_nodes if n.op == "get_attr"]
            line = next((node_line(node) for nodes in bodies for node in nodes if node_line(node)), node_line(region))
            raise CaptureError(
                f"{name_of(region.target)} cannot be split into operations{line}; write it with plain tensor operations"
            )
        inner = _body(owner, body)
        values: dict[fx.Node, Any] = {}
        for placeholder, argument in zip(inner.graph.find_nodes(op="placeholder"), arguments, strict=True):
            value = outer[argument] if isinstance(argument, fx.Node) else argument
            if not with_gradient and isinstance(value, fx.Node) and self._has_gradient(value):
                detached = self._program.call_function(torch.ops.aten.detach.default, (value,))
                detached.meta = {**region.meta, "val": value.meta["val"]}
                value = detached
            values[placeholder] = value
        for node in inner.graph.nodes:
            if node.op == "output":
                return fx.node.map_arg(tuple(node.args[0]), values.__getitem__)
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                values[node] = self.inline(node, values, inner, precision)
            elif node.op == "call_function":
                values[node] = self._copied(node, values, precision)
        raise AssertionError("a graph ends with its output")

    def _copied(self, node: fx.Node, values: Mapping[fx.Node, Any], precision: Autocast | None) -> Any:
        """A copy of ``node`` on the ``values`` of its arguments, rewritten if it ran under ``precision``."""
        if node.target is operator.getitem:
            results, index = args_of(node)
            if isinstance(values[results], tuple):  # results of a region, or of an operator that was replaced
                return values[results][index]
        copy = self._program.node_copy(node, values.__getitem__)
        return copy if precision is None else self.without_autocast(copy, precision)

    def _has_gradient(self, node: fx.Node) -> bool:
        """Whether a gradient flows from ``node`` to a parameter. A buffer, which a region may write to, has none."""
        pending = [node]
        while pending:
            current = pending[-1]
            missing = [used for used in current.all_input_nodes if used not in self._learns]
            pending += missing
            if not missing:
                pending.pop()
                flows = any(self._learns[used] for used in current.all_input_nodes)
                flows &= current.target is not torch.ops.aten.detach.default
                self._learns[current] = flows or current.name in self._parameters
        return self._learns[node] and is_tensor(node)

    def without_autocast(self, node: fx.Node, precision: Autocast) -> fx.Node | tuple[fx.Node, ...]:
        """Rewrite ``node`` so that it computes without mixed precision what it did with it; returns what it results in.

        Raises CaptureError if neither casts, nor a dtype, nor the operators of which it is composed do so.
        """
        if not isinstance(node.target, torch._ops.OpOverload) or node.target in MARKS:
            return node
        rewriting = precision.rewriting(node, self._mode)
        if rewriting is None:
            return self._replaced_by_parts(node, precision)

        def cast(argument: fx.Node) -> fx.Node:
            dtype = rewriting.casts.get(argument)
            if dtype is None:
                return argument
            if (argument, dtype) in precision.cast_weights:
                return precision.cast_weights[argument, dtype]
            with self._program.inserting_before(node):
                made = self._program.call_function(TO_COPY, (argument,), {"dtype": dtype})
            with self._mode:
                made.meta = {**node.meta, "val": argument.meta["val"].to(dtype)}
            if argument.name in self._parameters:
                precision.cast_weights[argument, dtype] = made
            return made

        if rewriting.casts:
            node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), cast)
        if rewriting.dtype is not None:
            node.kwargs = {**node.kwargs, "dtype": rewriting.dtype}
        return node

    def _replaced_by_parts(self, node: fx.Node, precision: Autocast) -> fx.Node | tuple[fx.Node, ...]:
        parts = precision.parts(node, self._mode)
        if parts is None:
            raise CaptureError(
                f"{name_of(node.target)} under torch.autocast cannot be rewritten as casts{node_line(node)}; "
                "disable autocast there and cast the arguments explicitly"
            )
        made: dict[fx.Node, Any] = dict(zip(parts.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
        with self._program.inserting_before(node):
            for part in parts.nodes:
                if part.op == "call_function":
                    part.meta = {**node.meta, "val": part.meta["val"]}
                    made[part] = self._copied(part, made, precision)
        output = args_of(parts.output_node())[0]
        if isinstance(output, fx.Node):
            results = made[output]
            node.replace_all_uses_with(results)
            self._program.erase_node(node)
        else:
            results = tuple(made[output_value] for output_value in output)
            _replace_results(node, results)
        return results


def _replace_results(node: fx.Node, results: tuple[fx.Node, ...]) -> None:
    """Replace ``node`` by its ``results``, of which each user takes one."""
    for user in list(node.users):
        user.replace_all_uses_with(results[args_of(user)[1]])
        node.graph.erase_node(user)
    node.graph.erase_node(node)


_VMAP_BEGINS, _VMAP_ENDS = predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting
_NOT_OPERATORS = (operator.getitem, predispatch.lazy_load_decompositions)


def _batch(program: fx.Graph, mode: FakeTensorMode) -> None:
    """Replace operations inside torch.vmap, written for one sample, by operations on all samples."""
    depth, region = 0, []
    for node in list(program.nodes):
        depth += node.target is _VMAP_BEGINS
        if depth:
            region.append(node)
        depth -= node.target is _VMAP_ENDS
        if region and not depth:
            _replace_batched(program, region, mode)
            region = []
    for node in reversed(program.nodes):
        if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload):
            if node.target is predispatch.lazy_load_decompositions:
                program.erase_node(node)
            elif node.target not in _NOT_OPERATORS and getattr(node.target, "__module__", "") == predispatch.__name__:
                raise CaptureError(
                    f"of the transforms of torch.func, only vmap can be captured{node_line(node)}; write what this one "
                    "computes with plain tensor operations there"
                )


def _replace_batched(program: fx.Graph, region: list[fx.Node], mode: FakeTensorMode) -> None:
    inside = set(region)
    inputs = list(dict.fromkeys(n for node in region for n in node.all_input_nodes if n not in inside))
    outputs = [node for node in region if any(user not in inside for user in node.users)]

    def run(*values: torch.Tensor) -> list[Any]:
        made: dict[fx.Node, Any] = dict(zip(inputs, values, strict=True))
        for node in region:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
            made[node] = target_of(node)(*args, **kwargs)
        return [made[node] for node in outputs]

    with mode, torch.no_grad():
        batched = make_fx(run)(*(node.meta["val"] for node in inputs)).graph
    copied: dict[fx.Node, Any] = dict(zip(batched.find_nodes(op="placeholder"), inputs, strict=True))
    with program.inserting_before(region[0]):
        for node in batched.nodes:
            if node.op == "call_function":
                copied[node] = program.node_copy(node, copied.__getitem__)
                copied[node].meta = {**region[0].meta, "val": node.meta["val"]}
            elif node.op == "output":
                for old, new in zip(outputs, node.args[0], strict=True):
                    old.replace_all_uses_with(copied[new], delete_user_cb=lambda user: user not in inside)
    for node in reversed(region):
        program.erase_node(node)


def _body(owner: fx.GraphModule, attribute: fx.Node) -> fx.GraphModule:
    """The module of a region's operations, which ``owner`` holds under the name that ``attribute`` reads."""
    body = owner.get_submodule(target_of(attribute))
    assert isinstance(body, fx.GraphModule)
    return body
