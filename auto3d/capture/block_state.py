"""What the forward of a block reads besides its arguments, in a form that shows whether two blocks are equal."""

import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from logging import Logger
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.fx import _symbolic_trace
from torch.fx.experimental import proxy_tensor
from torch.nn.modules import module as torch_module

from auto3d.capture.errors import is_model_code
from auto3d.capture.python_state import held_by, is_empty

OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
ALL = "__dict__"  # stands for every attribute of a module
_OUTSIDE = -1  # stands for a module outside of the block
_TRACING = frozenset(str(module.__file__) for module in (torch_module, proxy_tensor, _symbolic_trace))
_SCALARS = (bool, int, str, bytes, type(None), type(...))
_KINDS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_IDENTICAL = (type, types.ModuleType, types.CodeType, torch._ops.OpOverload, torch._ops.OpOverloadPacket, Enum)
_CONTAINERS = (list, tuple, set, frozenset, dict, OrderedDict, defaultdict, deque)
_HEAP_TYPE, _POINTER = 1 << 9, 8  # Python's flag of a class that a class statement made; bytes
_MISSING = "an attribute that the module does not have"

_CODE = (  # Callables without state, or whose state is compared with the state of the model's own code.
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    staticmethod,
    classmethod,
    property,
    Logger,
)
_CACHED = type(cache(len))

Global = tuple[Mapping[str, Any], str]  # globals of a module or attributes of a class, a name in them
Read = tuple[int, str]  # number of a module in the block, name of its attribute
Frozen = Hashable


class _UnclearError(Exception):
    """A value of which equality cannot be shown."""


@dataclass(frozen=True, eq=False)
class Unclear:
    """Stands for a value of which equality with another object cannot be shown."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unclear) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@contextmanager
def attribute_reads(modules: Sequence[nn.Module]) -> Iterator[set[Read]]:
    """A set to which each attribute of ``modules`` that code inside reads is added, also by ``hasattr``."""
    number = {id(vars(module)): index for index, module in enumerate(modules)}
    reads: set[Read] = set()
    plain = object.__getattribute__

    def read(module: nn.Module, name: str) -> Any:
        if name not in OF_EVERY_MODULE:
            attributes = plain(module, ALL)
            index = number.get(id(attributes), _OUTSIDE)
            if name == ALL:
                if sys._getframe(1).f_code.co_filename not in _TRACING:
                    reads.add((index, name))
            elif index != _OUTSIDE or name in attributes:
                reads.add((index, name))
        return plain(module, name)

    with patch.object(nn.Module, "__getattribute__", read, create=True):
        yield reads


def frozen_reads(reads: set[Read], modules: Sequence[nn.Module]) -> dict[Read, Frozen] | None:
    """The values of ``reads`` in comparable form; None if a value cannot be compared."""
    if any(index == _OUTSIDE for index, _ in reads):
        return None
    freeze = _Freezer(modules)
    values = {(index, name): freeze(_value(modules[index], name)) for index, name in reads}
    return None if any(isinstance(value, Unclear) for value in values.values()) else values


def frozen_attributes(modules: Sequence[nn.Module]) -> dict[Read, Frozen]:
    """All attributes of ``modules`` in comparable form; an ``Unclear`` attribute is equal to the same object only."""
    freeze = _Freezer(modules)
    return {
        (index, name): freeze(value)
        for index, module in enumerate(modules)
        for name, value in vars(module).items()
        if name not in OF_EVERY_MODULE
    }


@contextmanager
def global_reads(modules: Sequence[nn.Module]) -> Iterator[dict[types.CodeType, tuple[list[Global], Frozen]]]:
    """A dict to which each function of the model's code that runs inside is added.

    It has the globals that the function may read, and their ``frozen_globals`` when it is first called.
    """
    ran: dict[types.CodeType, tuple[list[Global], Frozen]] = {}
    seen: dict[int, types.CodeType] = {}  # by id: Python hashes a code object anew each time, with all of its bytes
    before = sys.gettrace()

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or id(code) in seen:
            return
        seen[id(code)] = code
        if is_model_code(code.co_filename):
            read_globals: list[Global] = []
            _add_globals(read_globals, frame.f_globals, code.co_names)
            ran[code] = (read_globals, frozen_globals(read_globals, modules))

    sys.settrace(note)
    try:
        yield ran
    finally:
        sys.settrace(before)


def _add_globals(collected: list[Global], owner: Mapping[str, Any], names: Sequence[str]) -> None:
    """Add the ``names`` that ``owner`` has, also in another module or a class that such a name stands for."""
    for name in names:
        if name in owner and not any(holder is owner and known == name for holder, known in collected):
            collected.append((owner, name))
            value = owner[name]
            module = value if isinstance(value, types.ModuleType) else sys.modules.get(getattr(value, "__module__", ""))
            file = getattr(module, "__file__", None)
            if isinstance(value, type | types.ModuleType) and file and is_model_code(file):
                _add_globals(collected, vars(value), names)


def frozen_globals(read: Sequence[Global], modules: Sequence[nn.Module]) -> tuple[Frozen, ...] | None:
    """The present values of ``read`` in comparable form; None if a value cannot be compared."""
    freeze = _Freezer(modules)
    values = [owner.get(name, _MISSING) for owner, name in read]
    frozen = [id(value) if isinstance(value, _CODE) or _is_cached(value) else freeze(value) for value in values]
    return None if any(isinstance(value, Unclear) for value in frozen) else tuple(frozen)


def _is_cached(value: Any) -> bool:
    """Whether ``value`` is a function of an installed package that keeps its results. A user's may keep state."""
    file = getattr(sys.modules.get(getattr(value, "__module__", "")), "__file__", None)
    return isinstance(value, _CACHED) and "-packages" in (file or "")


def _value(module: nn.Module, name: str) -> Any:
    if name != ALL:
        return vars(module).get(name, _MISSING)
    return {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}


class _Freezer:
    """Makes comparable copies of values; a module of the block is described by its number in the block."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._number = {id(module): index for index, module in enumerate(modules)}
        self._done: dict[int, tuple[Any, Frozen]] = {}  # id -> object, its copy; holding the object keeps its id unique
        self._open: set[int] = set()

    def __call__(self, value: Any) -> Frozen:
        try:
            return self._of(value)
        except _UnclearError:
            self._open.clear()
            return Unclear(value)

    def _of(self, value: Any) -> Frozen:
        if isinstance(value, _SCALARS):
            return (type(value), value)
        if isinstance(value, float | complex):
            return (type(value), repr(value))
        if id(value) in self._done:
            return self._done[id(value)][1]
        if id(value) in self._open:  # a cycle
            raise _UnclearError
        self._open.add(id(value))
        frozen = self._content(value)
        self._open.discard(id(value))
        self._done[id(value)] = (value, frozen)
        return frozen

    def _content(self, value: Any) -> Frozen:
        match value:
            case nn.Module():
                return (nn.Module, self._number.get(id(value), value))
            case partial():
                return (partial, self._of(value.func), self._of(value.args), self._of(value.keywords))
            case types.MethodType():
                return (types.MethodType, self._of(value.__func__), self._of(value.__self__))
            case types.FunctionType():
                cells = tuple(cell.cell_contents for cell in value.__closure__ or () if not is_empty(cell))
                parts = (value.__code__, cells, value.__defaults__, value.__kwdefaults__, vars(value))
                return (types.FunctionType, *map(self._of, parts))
            case types.BuiltinFunctionType() if isinstance(value.__self__, types.ModuleType | None):
                return (types.BuiltinFunctionType, value)
        if isinstance(value, _KINDS):
            return (type(value), str(value))
        if isinstance(value, _IDENTICAL):
            return ("identical", id(value))
        return self._of_object(value)

    def _of_object(self, value: Any) -> Frozen:
        kind = type(value)
        containers = [base for base in kind.__mro__ if base in _CONTAINERS]
        if any(_is_native(base) for base in kind.__mro__ if base is not object and base not in _CONTAINERS):
            raise _UnclearError  # it holds more than Python code can see
        slots = {name for base in kind.__mro__ for name in getattr(base, "__slots__", ()) if hasattr(value, name)}
        attributes = {name: getattr(value, name) for name in sorted(slots)} | getattr(value, "__dict__", {})
        held: Any = held_by(value)
        content: Any = None
        if isinstance(value, Mapping) and held is not None:
            content = tuple((self._of(key), self._of(item)) for key, item in held)
        elif isinstance(value, set | frozenset):
            content = frozenset(map(self._of, held))
        elif containers:
            content = tuple(map(self._of, held))
        factory = self._of(getattr(value, "default_factory", None))
        return (kind, content, factory, tuple((name, self._of(attribute)) for name, attribute in attributes.items()))


def _is_native(kind: type) -> bool:
    """Whether the objects of ``kind``, a class other than object, hold more than attributes and slots."""
    assert kind.__base__ is not None
    slots = getattr(kind, "__slots__", ())
    pointers = 2 + len((slots,) if isinstance(slots, str) else slots)  # 2: to the attributes and to weak references
    return not kind.__flags__ & _HEAP_TYPE or kind.__basicsize__ - kind.__base__.__basicsize__ > pointers * _POINTER
