"""Rewrite an exported program so that it can be cut anywhere: an operation may only write to a whole buffer.

A write to a view becomes a new value of the whole tensor, and every view that is used later is made again from it.
"""

import operator
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from auto3d.capture.errors import CaptureError, node_line
from auto3d.capture.nodes import args_of, kwargs_of, target_of

_aten = torch.ops.aten
_SCATTER = {  # view -> operator that returns the whole tensor with the viewed elements replaced
    _aten.slice.Tensor: _aten.slice_scatter.default,
    _aten.select.int: _aten.select_scatter.default,
    _aten.diagonal.default: _aten.diagonal_scatter.default,
}
_TRANSPOSITIONS = {_aten.transpose, _aten.t, _aten.swapaxes, _aten.swapdims, _aten.numpy_T, _aten.mT, _aten.matrix_H}
_SAME_ORDER = {  # views that keep all elements in the same order
    _aten.view,
    _aten.reshape,
    _aten._unsafe_view,
    _aten.view_as,
    _aten.reshape_as,
    _aten.flatten,
    _aten.unflatten,
    _aten.squeeze,
    _aten.unsqueeze,
    _aten.contiguous,
    _aten.to,
    _aten.type_as,
    _aten.alias,
    _aten.ravel,
}
_NORMALISATIONS = (_aten.batch_norm.default, _aten.instance_norm.default)


def remove_in_place(
    program: fx.Graph, mode: FakeTensorMode, *, buffers: Collection[str], inputs: Collection[str]
) -> None:
    """Replace in-place operators by out-of-place operators, also where they write through views.

    Writes to ``buffers`` (batch statistics, moving averages) stay, since a buffer lives on one stage. A reader of such
    a buffer gets a copy, since the next micro-batch may write to it before the backward of this micro-batch. ``inputs``
    are the model's: only this micro-batch sees a write to an input. Raises CaptureError for a write to anything else
    that outlives the forward, and for a write that cannot be rewritten.
    """
    for node in list(program.nodes):
        if is_mutable(node) and written_arguments(node) != args_of(node)[:1]:
            _copy_to_out(program, node, mode)
    rewriter = _Rewriter(program, mode, set(buffers), inputs)
    for node in list(program.nodes):
        if is_mutable(node):
            rewriter.remove(node)
    written_names = written_buffers(program, buffers)
    for node in list(program.nodes):
        if node.name in written_names or (is_mutable(node) and node.name in rewriter.whole_buffers):
            _copy_for_readers(program, node)


class _Rewriter:
    """Removes the in-place operations of a program one by one, in order."""

    def __init__(
        self, program: fx.Graph, mode: FakeTensorMode, whole_buffers: set[str], inputs: Collection[str]
    ) -> None:
        self.whole_buffers = whole_buffers  # names of the nodes whose value is a whole buffer
        self._program, self._mode, self._inputs = program, mode, inputs
        self._anchor: fx.Node  # new nodes are inserted before this node
        self._now: int  # position of the operation that is being removed; new nodes get the same position
        self._position = {node: index for index, node in enumerate(program.nodes)}
        self._views: set[fx.Node] = set()  # nodes that are views of their first argument
        self._unclear: set[int] = set()  # memory that nodes share in any other way
        shown: set[int] = set()
        for node in program.nodes:
            memories, source = _memories(node), args_of(node)[0] if args_of(node) else None
            if isinstance(source, fx.Node) and memories & _memories(source) and node.op == "call_function":
                if node.target is not operator.getitem or source in self._views:
                    self._views.add(node)
            else:
                self._unclear |= memories & shown
                shown |= memories

    def remove(self, node: fx.Node) -> None:
        """Replace ``node``, unless it writes to a whole buffer, and make all later readers use its result."""
        written, position = args_of(node)[0], self._position[node]
        writes_buffer = written.name in self.whole_buffers
        self._anchor, self._now = node.next if writes_buffer else node, position
        if torch.Tag.inplace_view in target_of(node).tags:  # changes only the shape under this name, not the memory
            earlier, new = [], {written: self._emit(_functional(node), *args_of(node), **node.kwargs)}
            self._views.add(new[written])
        else:
            chain = self._chain(written)
            earlier = [view for view in self._showing(chain[-1]) if self._position[view] < position]
            if writes_buffer:
                self.whole_buffers.add(node.name)
                new = {view: node for view in earlier if view.name in self.whole_buffers}
            else:
                new = self._values_after(node, chain)
        if not writes_buffer:
            new[node] = new[written]
        for value in dict.fromkeys([*new, *earlier]):
            later = [user for user in value.users if self._position[user] > position]
            if later and value not in new:
                self._regenerate(value, new)
            for user in later:
                user.replace_input_with(value, new[value])
                if user.target is _aten.view.default:  # the new value may have other strides
                    user.target = _aten.reshape.default
        if not writes_buffer:
            self._views.discard(node)
            self._program.erase_node(node)

    def _chain(self, node: fx.Node) -> list[fx.Node]:
        """``node``, the tensor that it is a view of, and so on up to a tensor that is no view."""
        chain = [node]
        while chain[-1] in self._views:
            chain.append(args_of(chain[-1])[0])
        return chain

    def _showing(self, base: fx.Node) -> list[fx.Node]:
        """``base`` and all views of it, including views of views."""
        showing = [base]
        for node in showing:
            showing.extend(user for user in node.users if user in self._views and args_of(user)[0] is node)
        return showing

    def _values_after(self, node: fx.Node, chain: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Node -> node of its value after the write, for the written tensor and every tensor that it is a view of."""
        base = chain[-1]
        if _memories(base) & self._unclear:
            raise CaptureError(
                f"{name_of(node.target)} writes in place to memory that other tensors share in a way that cannot be "
                f"captured{node_line(node)}; use the out-of-place form there, or write to a clone"
            )
        if base.op == "placeholder" and base.name not in self._inputs and base.name not in self.whole_buffers:
            if node.target is torch.ops.aten.embedding_renorm_.default:
                raise CaptureError(
                    f"an embedding with max_norm shortens the rows that it looks up{node_line(node)}, and no forward "
                    "may change a parameter; leave max_norm out"
                )
            raise CaptureError(
                f"{name_of(node.target)} writes in place to a parameter or a constant of the model{node_line(node)}; "
                "write to a copy there, or make the tensor a buffer"
            )
        new = {chain[0]: self._value_written(node)}
        for view, whole in pairwise(chain):
            if view.target is operator.getitem:  # a view of several that an operator returns
                new[args_of(whole)[0]] = self._with_part(args_of(whole)[0], self._piece(view), new[view], node)
            elif whole not in new:
                new[whole] = self._with_part(whole, view, new[view], node)
        if base.name in self.whole_buffers:
            new[base] = self._emit(_aten.copy_.default, base, new[base])
            self.whole_buffers.add(new[base].name)
        return new

    def _value_written(self, node: fx.Node) -> fx.Node:
        written = args_of(node)[0]
        if node.target is _aten.copy_.default:  # the out-of-place copy has no derivative
            value = self._emit(_aten.expand_as.default, args_of(node)[1], written)
        else:
            value = self._emit(_functional(node), *args_of(node), **node.kwargs)
        if _dtype(value) != _dtype(written):  # an in-place operator keeps the dtype of the tensor that it writes to
            value = self._emit(_aten._to_copy.default, value, dtype=_dtype(written))
        return value

    def _with_part(self, whole: fx.Node, view: fx.Node, value: fx.Node, node: fx.Node) -> fx.Node:
        """``whole`` with ``value`` in place of the elements of ``view``, a view of it; ``node`` is the write."""
        packet = getattr(view.target, "overloadpacket", None)
        if view.target in _SCATTER:
            return self._emit(_SCATTER[target_of(view)], whole, value, *args_of(view)[1:], **view.kwargs)
        if packet in _SAME_ORDER:
            changed = self._emit(_aten.reshape.default, value, list(whole.meta["val"].shape))
        elif packet in _TRANSPOSITIONS:
            changed = self._emit(target_of(view), value, *args_of(view)[1:], **kwargs_of(view))
        elif packet is _aten.permute:
            dims = [dim % len(args_of(view)[1]) for dim in args_of(view)[1]]
            changed = self._emit(_aten.permute.default, value, [dims.index(dim) for dim in range(len(dims))])
        else:
            source = args_of(view)[0] if view.target is operator.getitem else view
            raise CaptureError(
                f"{name_of(node.target)} writes in place to a tensor that shares memory with another one, made by "
                f"{name_of(target_of(source))}{node_line(node)}; use the out-of-place form there, or write to a clone"
            )
        return changed

    def _piece(self, taken: fx.Node) -> fx.Node:
        """A view of several that split, chunk, unbind or the like return, made directly from their source."""
        several, index = args_of(taken)
        source, pieces = args_of(several)[0], several.meta["val"]
        names = [argument.name for argument in target_of(several)._schema.arguments]
        arguments = dict(zip(names, args_of(several), strict=False)) | kwargs_of(several)
        dim = arguments.get("dim", 0)
        if pieces[index].dim() < source.meta["val"].dim():
            return self._emit(_aten.select.int, source, dim, index)
        start = sum(piece.shape[dim] for piece in pieces[:index])
        return self._emit(_aten.slice.Tensor, source, dim, start, start + pieces[index].shape[dim])

    def _regenerate(self, view: fx.Node, new: dict[fx.Node, fx.Node]) -> None:
        """Make ``view``, and the views that it is a view of, again from the values in ``new`` after the write."""
        pending = [ancestor for ancestor in self._chain(view) if ancestor not in new]
        while pending:
            ancestor = pending.pop()
            new[ancestor] = self._emit(
                target_of(ancestor), new[args_of(ancestor)[0]], *args_of(ancestor)[1:], **kwargs_of(ancestor)
            )
            self._views.add(new[ancestor])

    def _emit(self, target: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        made = _emit(self._program, self._anchor, self._mode, target, args, kwargs)
        self._position[made] = self._now
        return made


def _emit(
    program: fx.Graph, before: fx.Node, mode: FakeTensorMode, target: Callable, args: tuple, kwargs: dict
) -> fx.Node:
    """A new node right before ``before``, with its fake value."""
    with program.inserting_before(before):
        made = program.create_node("call_function", target, args, kwargs, name=name_of(target))
    args, kwargs = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
    with mode, torch.no_grad():
        made.meta = {**before.meta, "val": target(*args, **kwargs)}
    return made


def _copy_to_out(program: fx.Graph, node: fx.Node, mode: FakeTensorMode) -> None:
    """Replace ``op(a, out=b)`` by ``b.copy_(op(a))``."""
    written = written_arguments(node)
    if len(written) != 1 or not any(argument.is_out for argument in target_of(node)._schema.arguments):
        raise CaptureError(
            f"{name_of(node.target)} writes to several tensors, or not to its first argument{node_line(node)}; "
            "use its out-of-place form there"
        )
    kwargs = {name: value for name, value in node.kwargs.items() if value is not written[0]}
    value = _emit(program, node, mode, _functional(node), args_of(node), kwargs)
    with program.inserting_before(node):
        copy = program.call_function(_aten.copy_.default, (written[0], value))
    copy.meta = {**node.meta, "val": written[0].meta["val"]}
    node.replace_all_uses_with(copy)
    program.erase_node(node)


def _functional(node: fx.Node) -> Any:
    """The operator that returns what ``node`` writes, from the same arguments without ``out``."""
    target = target_of(node)
    wanted = [str(arg.type) for arg in target._schema.arguments if not arg.is_out]
    name = name_of(target)
    name = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")  # a |= b -> a | b; add_ -> add
    packets = [getattr(getattr(torch.ops, target.namespace), form, None) for form in (name, f"{name}_functional")]
    overloads = [getattr(packet, form) for packet in packets if packet is not None for form in packet.overloads()]
    for candidate in sorted(overloads, key=lambda overload: overload._overloadname != target._overloadname):
        if not candidate._schema.is_mutable and [str(arg.type) for arg in candidate._schema.arguments] == wanted:
            return candidate
    raise CaptureError(
        f"{name_of(target)} writes in place and has no out-of-place form{node_line(node)}; use other operators there"
    )


def written_arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments that the operator of ``node`` writes to."""
    written = []
    for index, argument in enumerate(target_of(node)._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args_of(node)[index] if index < len(args_of(node)) else node.kwargs.get(argument.name))
    return tuple(written)


def written_buffers(program: fx.Graph, buffers: Collection[str]) -> set[str]:
    """The placeholders in ``buffers`` that an operation of ``program`` writes to."""
    first = {name: name for name in buffers}  # node whose value is a whole buffer -> placeholder of that buffer
    for node in program.nodes:
        if is_mutable(node) and args_of(node)[0].name in first:
            first[node.name] = first[args_of(node)[0].name]
    chained = {first[name] for name in first if name != first[name]}
    normalised = {
        argument.name
        for node in program.nodes
        if _writes_statistics(node)
        for argument in node.all_input_nodes
        if argument.name in buffers
    }
    return chained | normalised


def memory_is_written(program: fx.Graph, placeholders: Collection[str]) -> bool:
    """Whether an operation of ``program`` writes to the memory of one of ``placeholders``."""
    memories = [_memories(node) for node in program.find_nodes(op="placeholder") if node.name in placeholders]
    held = set[int]().union(*memories)
    return any(
        _writes_statistics(node)
        or (is_mutable(node) and any(held & _memories(written) for written in written_arguments(node)))
        for node in program.nodes
    )


def _copy_for_readers(program: fx.Graph, buffer: fx.Node) -> None:
    for user in list(buffer.users):
        if _writes_statistics(user) or user.op == "output":
            continue
        with program.inserting_before(user):
            copy = program.call_function(_aten.clone.default, (buffer,))
        copy.meta = {**user.meta, "val": buffer.meta["val"]}
        kept = user.args[:1] if is_mutable(user) else ()
        args, kwargs = _replaced((args_of(user)[len(kept) :], kwargs_of(user)), buffer, copy)
        user.args, user.kwargs = (*kept, *args), kwargs
        if not copy.users:
            program.erase_node(copy)


def _replaced(arguments: Any, old: fx.Node, new: fx.Node) -> Any:
    """``arguments`` with ``new`` in place of ``old``."""
    return fx.node.map_arg(arguments, lambda node: new if node is old else node)


def is_mutable(node: fx.Node) -> bool:
    """Whether the operator writes to an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and target_of(node)._schema.is_mutable


def _memories(node: fx.Node) -> set[int]:
    """Identifiers of the memory of the node's values: nodes that share memory have an identifier in common."""
    values = tree_leaves(node.meta.get("val"))
    return {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}


def _writes_statistics(node: fx.Node) -> bool:
    """Whether ``node`` is a batch norm in training: it writes running statistics, though its schema does not say so."""
    return node.target in _NORMALISATIONS and bool(args_of(node)[5])


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def name_of(target: Any) -> str:
    """The operator's name as a user knows it, for example ``mul_``."""
    return target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else target.__name__
