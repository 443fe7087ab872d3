"""Trace a repeated block once: a call that equals an earlier call becomes one operation, expanded after the export.

A block is a module that has siblings like it, such as a layer of a transformer, or that is called several times. The
code around the blocks runs for every block. Of the blocks, only the first of each kind is traced: its operations stand
between two marks in the program. A later call becomes one operation if it must do the same: the two blocks have the
same classes and equal tensors, the arguments are equal, and so is each attribute that the first block read. Anything
that cannot be shown to be equal is traced as if no block had come before. ``expand`` copies the operations.
"""

import operator
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    _AttrProxy,
    _ModuleStackTracer,
    disable_proxy_modes_tracing,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from auto3d.capture.block_state import (
    Frozen,
    Global,
    Read,
    attribute_reads,
    frozen_attributes,
    frozen_globals,
    frozen_reads,
    global_reads,
)
from auto3d.capture.expand import BEGINS, ENDS, REPEATS, Like
from auto3d.capture.in_place import is_mutable, written_arguments
from auto3d.capture.known_values import KnownValues
from auto3d.capture.python_state import PythonState, StateSnapshot

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
_CONTAINERS = (tuple, list, dict, OrderedDict, defaultdict)
# A module keeps its hooks in these attributes; torch has as many for the hooks of all modules.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)


@dataclass(frozen=True)
class _BlockCall:
    """A call of a block: what it gets, in a form that is equal for two calls that must do the same."""

    modules: list[nn.Module]  # the block's modules in the order of ``Module.modules``
    tensors: list[torch.Tensor]  # arguments, then parameters and buffers
    nodes: list[fx.Node]  # nodes of ``tensors`` in the program
    arguments: int  # number of ``tensors`` that are arguments
    described: tuple


@dataclass(frozen=True)
class _Template:
    """A traced block that later calls may repeat."""

    number: str
    call: _BlockCall
    attributes: dict[Read, Frozen]  # values of the attributes that its forward reads
    globals: list[Global]  # globals that its code may read
    surroundings: tuple[StateSnapshot, Frozen]  # the state of the model's code, and the values of ``globals``
    outputs: list[torch.Tensor]  # tensors that it makes
    renamed: dict[int, bool]
    """Numbers of the call's tensors that an operation of the block returns, such as a cast that changes nothing, and
    whether they depend on data. Later operations use the result of that operation."""
    leaves: list[tuple[str, Any]]  # leaves of its result: ("argument" or "output", number), or ("plain", value)
    spec: pytree.TreeSpec


@dataclass
class RepeatedBlocks:
    """The blocks that one trace meets."""

    known_values: KnownValues
    traced: int = 0  # number of blocks that were traced as a template
    repeated: int = 0  # number of calls that were not traced
    _templates: list[_Template] = field(default_factory=list)
    _calls: Counter[nn.Module] = field(default_factory=Counter)
    _varies: dict[fx.Node, bool] = field(default_factory=dict)
    _inside: bool = False  # whether a template is being traced
    _blocks: set[nn.Module] | None = None  # None until the model is called
    _state: PythonState | None = None
    _ambient: tuple = ()

    @contextmanager
    def found(self) -> Iterator[None]:
        """Find repeated blocks in the trace inside."""
        call_module = _ModuleStackTracer.call_module

        def call(tracer: Any, module: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                return self._run(tracer, module, forward, args, kwargs)

            return call_module(tracer, module, run, args, kwargs)

        with patch.object(_ModuleStackTracer, "call_module", call):
            yield

    def _run(self, tracer: Any, called: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        module: nn.Module = called.get_base() if isinstance(called, _AttrProxy) else called  # type: ignore[operator]
        if self._blocks is None:
            self._blocks, self._state, self._ambient = _repeated_in(module), PythonState(module), _ambient()
        if self._inside or not self._may_repeat(module):
            return forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            call = self._call(tracer, module, args, kwargs)
        if call is None:
            return forward(*args, **kwargs)
        template = self._equal(call)
        if template is not None:
            self.repeated += 1
            return self._repeat(tracer, template, call)
        self._inside = True
        try:
            return self._trace(tracer, call, forward, args, kwargs)
        finally:
            self._inside = False

    def _may_repeat(self, module: nn.Module) -> bool:
        """Whether ``module`` is a block: it repeats in the model, or was called before and has no blocks inside."""
        assert self._blocks is not None
        if module in self._blocks:
            return True
        self._calls[module] += 1
        return self._calls[module] > 1 and bool(module._modules) and self._blocks.isdisjoint(module.modules())

    def _call(self, tracer: Any, module: nn.Module, args: tuple, kwargs: dict) -> _BlockCall | None:
        """The call in comparable form; None if it cannot be compared."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if _ambient() != self._ambient or not _is_plain(spec) or any(map(bool, _GLOBAL_HOOKS)):
            return None
        modules = list(module.modules())
        structure = _structure(modules)
        arguments = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        state = [
            tensor for inner in modules for owned in (inner._parameters, inner._buffers) for tensor in owned.values()
        ]
        tensors = [*arguments, *(tensor for tensor in state if tensor is not None)]
        values = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        if structure is None or not all(map(_is_simple, tensors)) or not all(type(value) in _PLAIN for value in values):
            return None
        slots = [get_proxy_slot(tensor, tracer, None) for tensor in tensors]
        nodes = [slot.proxy.node for slot in slots if slot is not None]
        if len(nodes) < len(tensors):  # a tensor that the trace does not know
            return None
        described = (
            spec,
            [(type(leaf), None if isinstance(leaf, torch.Tensor) else repr(leaf)) for leaf in leaves],
            structure,
            [_metadata(tensor) for tensor in tensors],
            _pattern(map(id, tensors)),
            _pattern(nodes),
            _pattern(_storage(tensor) for tensor in tensors),
            [self._depends(node) for node in nodes],
        )
        return _BlockCall(modules, tensors, nodes, len(arguments), described)

    def _depends(self, node: fx.Node) -> bool:
        """Whether the value of ``node`` depends on an input or a parameter, so that no code can read it."""
        pending = [] if node in self._varies else [node]
        while pending:
            current = pending[-1]
            missing = [used for used in current.all_input_nodes if used not in self._varies]
            pending += missing
            if not missing:
                pending.pop()
                inherited = any(self._varies[used] for used in current.all_input_nodes)
                self._varies[current] = inherited or current.op == "placeholder"
        return self._varies[node]

    def _equal(self, call: _BlockCall) -> _Template | None:
        """A template that does the same as ``call`` must do; None if there is none."""
        assert self._state is not None
        candidates = [template for template in self._templates if template.call.described == call.described]
        state = self._state.of_code() if candidates else None
        for template in candidates:
            attributes = frozen_reads(set(template.attributes), call.modules)
            surroundings = (state, frozen_globals(template.globals, call.modules))
            if attributes == template.attributes and surroundings == template.surroundings:
                return template
        return None

    def _repeat(self, tracer: Any, template: _Template, call: _BlockCall) -> Any:
        """The result of the block, as tensors that one operation makes."""
        with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
            like = Like()
            outputs = [like(tensor) for tensor in template.outputs]
        proxy = tracer.create_proxy("call_function", REPEATS, (_proxies(tracer, call), template.number), {})
        made = [*outputs, *(call.tensors[index] for index in template.renamed)]
        with torch._C.DisableTorchFunction():
            track_tensor_tree(made, proxy, constant=None, tracer=tracer)
            for index, depends in template.renamed.items():
                self._varies[get_proxy_slot(call.tensors[index], tracer).proxy.node] = depends
        values = {"argument": call.tensors.__getitem__, "output": outputs.__getitem__, "plain": lambda value: value}
        return pytree.tree_unflatten([values[kind](value) for kind, value in template.leaves], template.spec)

    def _trace(self, tracer: Any, call: _BlockCall, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """The result of ``forward``, whose operations become a template if that is possible."""
        assert self._state is not None
        number = str(self.traced)
        self.traced += 1
        given = pytree.tree_flatten((args, kwargs))
        attributes, code, draws = frozen_attributes(call.modules), self._state.of_code(), _random_states()
        evaluated = self.known_values.readings
        begin = tracer.create_proxy("call_function", BEGINS, (_proxies(tracer, call), number), {}).node
        with global_reads(call.modules) as ran, attribute_reads(call.modules) as reads:
            result = forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            unchanged = (
                evaluated == self.known_values.readings
                and draws == _random_states()
                and attributes == frozen_attributes(call.modules)
                and code == self._state.of_code()
                and _ambient() == self._ambient
                and _structure(call.modules) == call.described[2]
                and [_metadata(tensor) for tensor in call.tensors] == call.described[3]
                and all(map(_is_simple, call.tensors))
                and _same(given, (args, kwargs))
            )
            unchanged &= all(frozen_globals(read, call.modules) == values for read, values in ran.values())
            frozen = frozen_reads(reads, call.modules)
            read = [entry for entries, _ in ran.values() for entry in entries]
            values = frozen_globals(read, call.modules)
            if unchanged and frozen is not None and values is not None:
                template = self._template(tracer, number, call, frozen, read, (code, values), begin, result)
                if template is not None:
                    self._templates.append(template)
                    made = [*template.outputs, *(call.tensors[index] for index in template.renamed)]
                    proxies = [get_proxy_slot(tensor, tracer).proxy for tensor in made]
                    tracer.create_proxy("call_function", ENDS, (proxies, number), {})
        return result

    def _template(
        self,
        tracer: Any,
        number: str,
        call: _BlockCall,
        attributes: dict[Read, Frozen],
        read: list[Global],
        surroundings: tuple[StateSnapshot, Frozen],
        begin: fx.Node,
        result: Any,
    ) -> _Template | None:
        """The template of the operations after ``begin``; None if an operation cannot be copied.

        They must read nothing but the call's tensors and each other, and write to no argument. Their results must be
        new tensors that depend on data, arguments, or plain values.
        """
        inside = _after(begin)
        storages = {_storage(tensor) for tensor in call.tensors}
        own = {_storage(tensor) for tensor in call.tensors[call.arguments :]}
        own -= {_storage(tensor) for tensor in call.tensors[: call.arguments]}
        known = {*inside, *call.nodes}
        for node in inside:
            if not _is_operation(node) or not known.issuperset(node.all_input_nodes):
                return None
            if is_mutable(node):
                written = (used for used in tree_leaves(written_arguments(node)) if isinstance(used, fx.Node))
                if any(_storage(used.meta["val"]) in storages - own for used in written):
                    return None
        leaves, spec = pytree.tree_flatten(result)
        if not _is_plain(spec):
            return None
        number_of = {id(tensor): index for index, tensor in reversed(list(enumerate(call.tensors)))}
        nodes = [get_proxy_slot(tensor, tracer).proxy.node for tensor in call.tensors]
        renamed = {index: self._depends(node) for index, node in enumerate(nodes) if node is not call.nodes[index]}
        outputs: list[torch.Tensor] = []
        described: list[tuple[str, Any]] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                if type(leaf) not in _PLAIN:
                    return None
                described.append(("plain", leaf))
            elif id(leaf) in number_of:
                described.append(("argument", number_of[id(leaf)]))
            else:
                slot = get_proxy_slot(leaf, tracer, None)
                if slot is None or not _is_simple(leaf) or _storage(leaf) in storages:
                    return None
                if slot.proxy.node not in inside or not self._depends(slot.proxy.node):
                    return None
                place = next((index for index, output in enumerate(outputs) if output is leaf), len(outputs))
                if place == len(outputs):
                    outputs.append(leaf)
                described.append(("output", place))
        if any(nodes[index] not in inside for index in renamed):
            return None
        return _Template(number, call, attributes, read, surroundings, outputs, renamed, described, spec)


def _proxies(tracer: Any, call: _BlockCall) -> list[fx.Proxy]:
    return [get_proxy_slot(tensor, tracer).proxy for tensor in call.tensors]


def _after(begin: fx.Node) -> dict[fx.Node, None]:
    """The nodes after ``begin``."""
    nodes: dict[fx.Node, None] = {}
    node = begin.next
    while node.op != "root":
        nodes[node] = None
        node = node.next
    return nodes


def _is_operation(node: fx.Node) -> bool:
    """Whether ``node`` is an operation that can be copied with its arguments."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
        return False
    return all(
        _is_simple(leaf) if isinstance(leaf, torch.Tensor) else type(leaf) in _PLAIN
        for leaf in tree_leaves(node.meta.get("val"))
    )


def _is_plain(spec: pytree.TreeSpec) -> bool:
    """Whether the containers hold their entries and nothing else."""
    kind = spec.type
    known = kind is None or kind in _CONTAINERS or pytree.is_namedtuple_class(kind)
    if not known and not (isinstance(kind, type) and issubclass(kind, OrderedDict)):
        return False
    return all(map(_is_plain, spec.children()))


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a fake tensor with fixed sizes whose memory is described by its strides."""
    return (
        isinstance(tensor, FakeTensor | nn.Parameter)
        and tensor.layout is torch.strided
        and not any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride()))
        and not (tensor.is_conj() or tensor.is_neg())
        and vars(tensor).keys() <= _attributes_of_every_tensor()
    )


@cache
def _attributes_of_every_tensor() -> frozenset[str]:
    """The attributes of a fake tensor to which the model's code has added none.

    They are not read when this module is imported, because a FakeTensorMode asks CUDA for its devices. A process in
    which CUDA has started cannot fork ranks that use it.
    """
    with _disable_current_modes(), FakeTensorMode():
        return frozenset(vars(nn.Parameter(torch.empty(0))))


def _metadata(tensor: torch.Tensor) -> tuple:
    return (
        type(tensor),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.untyped_storage().nbytes(),
    )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _pattern(keys: Any) -> list[int]:
    """Number of each key's first occurrence, which shows which of the keys are the same."""
    first: dict[Any, int] = {}
    return [first.setdefault(key, len(first)) for key in keys]


def _same(flat: tuple[list, pytree.TreeSpec], tree: Any) -> bool:
    """Whether ``tree`` still has the leaves and the structure of ``flat``."""
    leaves, spec = pytree.tree_flatten(tree)
    return spec == flat[1] and all(leaf is other for leaf, other in zip(flat[0], leaves, strict=True))


def _structure(modules: Sequence[nn.Module]) -> list[tuple] | None:
    """The classes of a block's modules, and the names of their parts; None if a module has hooks."""
    if any(getattr(module, name) for module in modules for name in HOOKS):
        return None
    if any(type(module).__getattribute__ is not nn.Module.__getattribute__ for module in modules):
        return None
    number = {module: index for index, module in enumerate(modules)}
    return [
        (
            type(module),
            module.training,
            [(name, part and number[part]) for name, part in module._modules.items()],
            [(name, tensor is None) for name, tensor in module._parameters.items()],
            [(name, tensor is None) for name, tensor in module._buffers.items()],
        )
        for module in modules
    ]


def _repeated_in(model: nn.Module) -> set[nn.Module]:
    """The outermost modules that have a sibling with the same classes and shapes, except modules without parts."""
    kinds: dict[tuple, int] = {}
    kind_of: dict[nn.Module, int] = {}

    def kind(module: nn.Module) -> int:
        if module not in kind_of:
            parts = tuple((name, part and kind(part)) for name, part in module._modules.items())
            shapes = tuple(
                (name, tensor is not None and tensor.shape)
                for owned in (module._parameters, module._buffers)
                for name, tensor in owned.items()
            )
            kind_of[module] = kinds.setdefault((type(module), parts, shapes), len(kinds))
        return kind_of[module]

    blocks: set[nn.Module] = set()
    pending, seen = [model], {model}
    while pending:
        parts = [part for part in pending.pop()._modules.values() if part is not None]
        number = Counter(map(kind, parts))
        for part in parts:
            if part._modules and number[kind(part)] > 1:
                blocks.add(part)
            elif part not in seen:
                seen.add(part)
                pending.append(part)
    return blocks


def _random_states() -> tuple:
    _, keys, *rest = np.random.get_state()
    return random.getstate(), np.asarray(keys).tobytes(), rest


def _ambient() -> tuple:
    """Settings of torch that change what an operator does or records."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
        torch.is_autocast_cache_enabled(),
        [id(mode) for mode in _get_current_function_mode_stack()],
        torch._C._functorch.peek_interpreter_stack() is None,
        torch._C._len_torch_dispatch_stack(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )
