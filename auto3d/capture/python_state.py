"""The Python state that a forward can read and change: attributes, globals, and Python's and numpy's random states.

A captured program repeats the operations of one forward. That is right only if the next forward would do the same, so
this state is compared before and after the traced forward.
"""

import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import nn

from auto3d.capture.errors import frame_line, is_model_code

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training", "_forward_hooks", "_forward_pre_hooks"}
_REGISTERED = ("_parameters", "_buffers", "_modules")
_SCALARS = (bool, int, str, bytes, complex, type(None), type(...))
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, tuple, set, frozenset, deque)
_LARGEST = 100_000  # most items that are compared; of a longer container, only the length is compared
_MOST = 1_000_000  # most values that are compared in total

Frozen = Hashable


@dataclass(frozen=True)
class Owner:
    """An object with named values, such as a module or a class."""

    described: str  # description of a value, with {} for its name
    values: Callable[[], Mapping[str, Any]]


class PythonState:
    """The state that the forward of ``model`` may depend on. The owners of the state are listed once, at creation."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._ids = {id(module) for module in self._modules.values()}
        self._code = [
            *(Owner(f"{cls.__name__}.{{}}", partial(_class_values, cls)) for cls in _classes(self._modules.values())),
            *(Owner(f"{module.__name__}.{{}}", partial(vars, module)) for module in user_modules(model)),
        ]
        self._owners = [
            Owner("Python's random state", lambda: {"": random.getstate()}),
            Owner("numpy's random state", lambda: {"": np.random.get_state(legacy=False)}),
            *(Owner(_of_module(path, module), partial(_attributes, module)) for path, module in self._modules.items()),
            *self._code,
        ]

    def now(self) -> "StateSnapshot":
        """A comparable copy of the present state."""
        return self._copy(self._owners)

    def of_code(self) -> "StateSnapshot":
        """A comparable copy of the globals and the class attributes of the model's code, without installed packages."""
        return self._copy(self._code)

    def _copy(self, owners: Iterable[Owner]) -> "StateSnapshot":
        freezing = _Freezing(self._ids)
        return StateSnapshot(
            {
                (owner, name): freezing(value)
                for owner in owners
                for name, value in list(owner.values().items())
                if not name.startswith("__")
            }
        )

    def attributes(self) -> dict[str, dict[str, Any]]:
        """Path of a module -> its attributes. torch.export resets them when the trace ends."""
        return {path: _attributes(module) for path, module in self._modules.items()}

    def set_attributes(self, attributes: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the modules' attributes to what ``attributes()`` returned."""
        for path, values in attributes.items():
            present = self._modules[path].__dict__
            for name in _attributes(self._modules[path]).keys() - values.keys():
                del present[name]
            present.update({name: value for name, value in values.items() if name not in _REGISTERED})


@dataclass(frozen=True)
class StateSnapshot:
    """(owner, name) -> comparable copy of a value."""

    values: Mapping[tuple[Owner, str], Frozen]

    def changes(self, before: "StateSnapshot") -> list["Change"]:
        """The values that changed, appeared or disappeared since ``before``."""
        keys = dict.fromkeys([*before.values, *self.values])
        absent = object()
        return [Change(*key) for key in keys if self.values.get(key, absent) != before.values.get(key, absent)]


@dataclass(frozen=True)
class Change:
    """A value that differs between two snapshots."""

    owner: Owner
    name: str

    def __str__(self) -> str:
        return self.owner.described.format(self.name)

    def line(self, run: Callable[[], Any]) -> str:
        """`` at FILE, line N``: the first line of the model's code that changes the value in ``run()``, or nothing."""

        def read() -> Frozen:
            return _Freezing(set())(self.owner.values().get(self.name))

        before, changing, latest = read(), "", ""

        def follow(frame: types.FrameType, event: str, _: Any) -> Callable | None:
            nonlocal changing, latest
            if changing or not is_model_code(frame.f_code.co_filename):
                return None if event == "call" else follow
            if read() != before:
                changing = latest
            caller = frame.f_back
            if event == "return" and caller is not None and is_model_code(caller.f_code.co_filename):
                latest = frame_line(caller)
            elif event != "return":
                latest = frame_line(frame)
            return follow

        tracing = sys.gettrace()
        sys.settrace(follow)
        try:
            run()
        except Exception:  # the forward may fail again, after its lines were traced
            return changing
        finally:
            sys.settrace(tracing)
        return changing


def user_modules(model: nn.Module) -> list[types.ModuleType]:
    """The Python modules outside of installed packages that define the classes of ``model``."""
    names = dict.fromkeys(cls.__module__ for cls in _classes(model.modules()))
    return [sys.modules[name] for name in names if name in sys.modules]


def _classes(modules: Iterable[nn.Module]) -> list[type]:
    kinds = dict.fromkeys(type(module) for module in modules)
    return list(dict.fromkeys(cls for kind in kinds for cls in kind.__mro__ if _is_user_class(cls)))


def _is_user_class(cls: type) -> bool:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    return is_model_code(file) and "-packages" not in file


def _of_module(path: str, module: nn.Module) -> str:
    return f"the attribute {{}} of {path or type(module).__name__}"


def _attributes(module: nn.Module) -> dict[str, Any]:
    attributes = {name: value for name, value in module.__dict__.items() if name not in _OF_EVERY_MODULE}
    return attributes | {name: tuple(module.__dict__[name]) for name in _REGISTERED}


def _class_values(cls: type) -> dict[str, Any]:
    return {name: getattr(value, "__func__", getattr(value, "fget", value)) for name, value in vars(cls).items()}


class _Freezing:
    """Makes comparable copies of values; an object that occurs several times is copied once."""

    def __init__(self, elsewhere: set[int]) -> None:
        self._elsewhere = elsewhere  # ids of modules, whose attributes are copied separately
        self._seen: dict[int, Any] = {}  # id -> object; holding the objects keeps their ids unique

    def __call__(self, value: Any) -> Frozen:
        if isinstance(value, _SCALARS):
            return (type(value).__name__, value)
        if isinstance(value, float):
            return ("float", repr(value))  # as text, nan equals nan
        if id(value) in self._elsewhere or id(value) in self._seen or len(self._seen) > _MOST:
            return type(value).__name__
        self._seen[id(value)] = value
        return (type(value).__name__, self._content(value))

    def _content(self, value: Any) -> Frozen:
        match value:
            case torch.Tensor():
                return (tuple(value.shape), str(value.dtype))
            case np.ndarray():
                return (value.shape, value.dtype.str, crc32(np.ascontiguousarray(value).data) if value.size else 0)
            case np.random.Generator():
                return self(value.bit_generator.state)
            case np.random.RandomState():
                return self(value.get_state(legacy=False))
            case random.Random():
                return self(value.getstate())
            case partial():
                return (self(value.func), self(value.args), self(value.keywords))
            case types.MethodType():
                return (self(value.__func__), self(value.__self__))
            case types.FunctionType():
                return self._of_function(value)
            case types.GeneratorType():
                return (value.gi_frame and value.gi_frame.f_lasti, self(value.gi_frame and value.gi_frame.f_locals))
            case type() | types.ModuleType() | Enum():
                return getattr(value, "__name__", str(value))
            case Iterator() if type(value).__module__ in ("builtins", "itertools"):
                return self(value.__reduce__())
        held = held_by(value)
        if held is None:
            return self._of_object(value)
        if len(held) > _LARGEST:
            return len(held)
        if isinstance(value, Mapping):
            return (*((self(key), self(item)) for key, item in held), self._of_object(value))
        if isinstance(value, Set):
            return frozenset(map(self, held))
        return (*map(self, held), self._of_object(value))

    def _of_function(self, function: types.FunctionType) -> Frozen:
        if not is_model_code(function.__code__.co_filename):
            return function.__qualname__
        cells = [cell.cell_contents for cell in function.__closure__ or () if not is_empty(cell)]
        return (
            function.__qualname__,
            *map(self, (cells, function.__defaults__, function.__kwdefaults__, vars(function))),
        )

    def _of_object(self, value: Any) -> Frozen:
        package = type(value).__module__.partition(".")[0]
        if package == "torch" or package in sys.stdlib_module_names:
            return None
        slots = {name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if hasattr(value, name)}
        attributes = {name: getattr(value, name) for name in sorted(slots)} | getattr(value, "__dict__", {})
        return tuple((name, self(attribute)) for name, attribute in attributes.items() if name not in _OF_EVERY_MODULE)


def held_by(value: Any) -> list[Any] | None:
    """The items of a container, or the (key, value) pairs of a mapping; None for any other object.

    Python's own types read them. A class of a package may do anything when its objects are read: transformers' lists
    of models import them all, and fail where a model needs another package.
    """
    kind = type(value)
    builtin: Any = next((base for base in kind.__mro__ if base in _CONTAINERS), None)
    if builtin in (OrderedDict, dict):
        return list(builtin.items(value))
    if builtin is not None:
        return list(builtin.__iter__(value))
    if kind.__module__.partition(".")[0] not in sys.stdlib_module_names:
        return None
    return list(value.items()) if isinstance(value, Mapping) else list(value) if isinstance(value, Set) else None


def is_empty(cell: types.CellType) -> bool:
    """Whether a closure's cell has no value yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


@dataclass
class Observation:
    """The state before and after the traced forward, and the modules' attributes at both times."""

    state: PythonState
    before: StateSnapshot | None = None
    after: StateSnapshot | None = None
    first_attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    last_attributes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def changes(self) -> list[Change]:
        if self.before is None or self.after is None:
            return []
        return self.after.changes(self.before)


@contextmanager
def observed(model: nn.Module) -> Iterator[Observation]:
    """Record the state of ``model`` at both ends of its forward, before torch.export resets its attributes."""
    observation = Observation(PythonState(model))

    def begin(*_: Any) -> None:
        if observation.before is None:
            observation.before = observation.state.now()
            observation.first_attributes = observation.state.attributes()

    def end(*_: Any) -> None:
        observation.after = observation.state.now()
        observation.last_attributes = observation.state.attributes()

    first = model.register_forward_pre_hook(begin, prepend=True)
    last = model.register_forward_hook(end)
    try:
        yield observation
    finally:
        first.remove()
        last.remove()
