"""Replace each repeated block of a program by a copy of the operations of the block that it repeats.

Two marks enclose the operations of a traced block, and one operation stands for each call that repeats it; ``repeats``
puts them into the trace. They name the tensors that the block gets and the tensors that it makes.
"""

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from auto3d.capture.autocast import Autocast
from auto3d.capture.in_place import is_mutable
from auto3d.capture.nodes import args_of

torch.library.define("auto3d::block_begins", "(Tensor[] inputs, str block) -> ()")
torch.library.define("auto3d::block_ends", "(Tensor[] outputs, str block) -> ()")
torch.library.define("auto3d::block_repeats", "(Tensor[] inputs, str block) -> Tensor[]")
BEGINS = torch.ops.auto3d.block_begins.default
ENDS = torch.ops.auto3d.block_ends.default
REPEATS = torch.ops.auto3d.block_repeats.default
MARKS = (BEGINS, ENDS, REPEATS)


class Like:
    """Makes tensors without values like given tensors; tensors that share memory still do so."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def share(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Let what is like ``tensor`` have the memory of ``other``."""
        self._storages[tensor.untyped_storage()._cdata] = other.untyped_storage()

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="meta")
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        meta.set_(self._storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        assert isinstance(tensor, FakeTensor)
        made = FakeTensor(tensor.fake_mode, meta, tensor.fake_device)
        if tensor.requires_grad:
            with tensor.fake_mode:  # a real tensor would need the device
                leaf = torch.zeros((), dtype=tensor.dtype, device=tensor.fake_device, requires_grad=True)
            made.copy_(leaf)  # a tensor that an operation made may be written to in place
        return made


class SideEffectError(Exception):
    """A traced block passes a tensor to code outside of it in another way than its result."""


def expand(program: fx.Graph, autocast: Autocast | None) -> int:
    """Replace each repeated block of ``program`` by the operations of the block that it repeats; returns their number.

    ``autocast`` has the casts of weights that ``inline_regions`` inserted. Raises SideEffectError where a repeated
    block may do more than the program shows.
    """
    begins = {args_of(node)[1]: node for node in program.find_nodes(op="call_function", target=BEGINS)}
    ends = {args_of(node)[1]: node for node in program.find_nodes(op="call_function", target=ENDS)}
    repeats = list(program.find_nodes(op="call_function", target=REPEATS))
    writes = any(map(is_mutable, program.nodes))
    copiers: dict[str, _Copier] = {}
    for node in repeats:
        number = args_of(node)[1]
        if number not in copiers:
            copiers[number] = _Copier(program, begins[number], ends[number], autocast, writes)
        copiers[number].copy_to(node)
    for mark in (*begins.values(), *ends.values()):
        program.erase_node(mark)
    return len(repeats)


class _Copier:
    """Copies the operations of one traced block."""

    def __init__(
        self, program: fx.Graph, begin: fx.Node, end: fx.Node, autocast: Autocast | None, writes: bool
    ) -> None:
        """``writes``: whether an operation of the program writes in place, so that it matters which memory is whose."""
        self._program, self._begin, self._end, self._writes = program, begin, end, writes
        self._casts = autocast.cast_weights if autocast is not None else {}
        self._cast_of = {made: key for key, made in self._casts.items()}
        self._operations: list[fx.Node] = []
        node = begin.next
        while node is not end:
            self._operations.append(node)
            node = node.next
        inside, outputs = {*self._operations, end}, set(args_of(end)[0])
        for node in self._operations:
            if node not in outputs and node not in self._cast_of and not inside.issuperset(node.users):
                raise SideEffectError

    def copy_to(self, repeat: fx.Node) -> None:
        """Replace ``repeat`` by copies of the operations on its inputs."""
        values = dict(zip(args_of(self._begin)[0], args_of(repeat)[0], strict=True))
        like = self._like(repeat) if self._writes else None

        def mapped(node: fx.Node) -> fx.Node:
            if node not in values and node in self._cast_of:  # a weight that an earlier operation casts
                values[node] = cast(node)
            return values[node]

        def cast(node: fx.Node) -> fx.Node:
            weight, dtype = self._cast_of[node]
            key = (values[weight], dtype)
            if key not in self._casts:
                self._casts[key] = copied(node)
            return self._casts[key]

        def copied(node: fx.Node) -> fx.Node:
            copy = self._program.node_copy(node, mapped)
            copy.meta = self._meta(node, repeat)
            if like is not None:
                copy.meta["val"] = pytree.tree_map_only(torch.Tensor, like, node.meta.get("val"))
            return copy

        with self._program.inserting_before(repeat), torch.no_grad():
            for node in self._operations:
                values[node] = cast(node) if node in self._cast_of else copied(node)
        outputs = [values[node] for node in args_of(self._end)[0]]
        for user in list(repeat.users):
            user.replace_all_uses_with(outputs[args_of(user)[1]])
            self._program.erase_node(user)
        self._program.erase_node(repeat)

    def _like(self, repeat: fx.Node) -> Like:
        """Makes the values of a copy's nodes, in the memory of the tensors that ``repeat`` gets and makes."""
        like = Like()
        for old, new in zip(args_of(self._begin)[0], args_of(repeat)[0], strict=True):
            like.share(old.meta["val"], new.meta["val"])
        for old, made in zip(args_of(self._end)[0], repeat.meta["val"], strict=True):
            like.share(old.meta["val"], made)
        return like

    def _meta(self, node: fx.Node, repeat: fx.Node) -> dict[str, Any]:
        """Metadata of a copy of ``node``, as if the code of the block that ``repeat`` stands for had made it."""
        meta = dict(node.meta)
        outer, new = self._begin.meta["nn_module_stack"], repeat.meta["nn_module_stack"]
        (block, _), (repeated, _) = (next(reversed(stack.values())) for stack in (outer, new))
        stack = dict(new)
        for key, (path, kind) in node.meta["nn_module_stack"].items():
            if key not in outer:
                stack[key.replace(block, repeated, 1)] = (path.replace(block, repeated, 1), kind)
        meta["nn_module_stack"] = stack
        calls, other = self._begin.meta.get("stack_trace") or "", repeat.meta.get("stack_trace") or ""
        if (trace := node.meta.get("stack_trace") or "").startswith(calls):
            meta["stack_trace"] = other + trace[len(calls) :]
        return meta
