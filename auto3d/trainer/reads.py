"""Values beside the model's own that the stages' code reads: in the trainer, in objects and in globals of a script.

A pipeline repeats the operations of one call of a loss or a forward, with the values that it read there. So they are
compared: a change that the code itself makes is refused, and the pipeline follows any other.
"""

import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from auto3d.capture.block_state import OF_EVERY_MODULE
from auto3d.capture.python_state import held_by
from auto3d.errors import InputError
from auto3d.trainer.looks import is_of_user, module_of, names_in, package_of, variables_of
from auto3d.trainer.own_loss import ComputeLoss

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEEPEST = 8  # most attributes and containers on the way to a value
_LARGEST = 1000  # items of a container that are compared, beside its length
_ABSENT = object()


class Reads:
    """The values that the script's code may read in ``loss`` (None: the model's own) and in the forwards of ``model``.

    The names in its code lead there from globals, enclosed variables and the objects of its methods. Parameters,
    buffers and modules are left out: the pipeline has their values, and follows what they are (instance.py).
    """

    def __init__(self, loss: ComputeLoss | None, model: nn.Module) -> None:
        self._who = "model" if loss is None else f"Trainer.{loss.name}"
        trainer = None if loss is None else loss.call.__self__  # type: ignore[attr-defined]  # it is a bound method
        self._packages = {package_of(kind) for kind in type(trainer).__mro__}
        self._objects = {
            f"model.{path}".rstrip("."): part for path, part in model.named_modules() if self._is_own(type(part))
        }
        functions: list[Any] = [type(module).forward for module in self._objects.values()]
        for module in model.modules():
            functions += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if trainer is not None:
            self._objects |= {"trainer": trainer, "compute_loss_func": trainer.compute_loss_func}
            functions.append(trainer.compute_loss)
        self._ids = {id(holder) for holder in self._objects.values()}
        self._functions: dict[CodeType, FunctionType] = {}
        self._names: set[str] = set()
        self._add(functions)
        while self._add(self._methods()):
            pass

    def now(self) -> dict[str, Hashable]:
        """Where a value is, as in ``trainer.state.epoch`` -> something that is equal for equal values."""
        values: dict[str, Hashable] = {}
        seen: dict[int, Any] = {}
        for place, value in self._roots():
            self._walk(place, value, values, seen, _DEEPEST)
        return values

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Raise InputError if the code changes a value when it is traced inside."""
        before = self.now()
        yield
        if place := changed(before, self.now()):
            raise InputError(
                f"{self._who}: it changes {place}, and runs only when the stages are made, not in each step: make "
                "before train() what stays the same, keep numbers that change in buffers of the model, and return what "
                "is to be logged as an output, for compute_metrics"
            )

    def _is_own(self, value: Any) -> bool:
        """Whether a class, a function or a Python module is the script's, or of a package that defines its Trainer."""
        return is_of_user(value) and (not _is_installed(value) or package_of(value) in self._packages)

    def _add(self, functions: Iterable[Any]) -> bool:
        """Take the script's own ``functions``, and those that they name; False if there is none that is new."""
        waiting, before = [*functions], len(self._functions)
        while waiting:
            reader = waiting.pop()
            reader = getattr(reader, "__func__", getattr(reader, "fget", reader))
            reader = getattr(reader, "__wrapped__", reader)
            if not isinstance(reader, FunctionType) or reader.__code__ in self._functions or not self._is_own(reader):
                continue
            self._functions[reader.__code__] = reader
            self._names |= {name for name in names_in(reader.__code__) if not name.startswith("__")}
            waiting += [value for _, value in variables_of(reader)]
        return len(self._functions) > before

    def _methods(self) -> Iterator[Any]:
        """Functions that the code reaches: values, and methods that it names or operators call."""
        reached: dict[int, Any] = {}
        for _, value in self._roots():
            self._reach(value, reached, _DEEPEST)
        yield from reached.values()
        kinds = (value if isinstance(value, type) else type(value) for value in reached.values())
        for base in dict.fromkeys(base for kind in kinds for base in kind.__mro__ if self._is_own(base)):
            for name, value in [*vars(base).items()]:
                if name in self._names or (name.startswith("__") and name != "__init__"):
                    yield value

    def _reach(self, value: Any, reached: dict[int, Any], depth: int) -> None:
        if depth and id(value) not in reached and not isinstance(value, _PLAIN):
            reached[id(value)] = value
            for _, part in self._parts("", value):
                self._reach(part, reached, depth - 1)

    def _roots(self) -> Iterator[tuple[str, Any]]:
        yield from self._objects.items()
        for function in [*self._functions.values()]:
            yield from variables_of(function)

    def _walk(self, place: str, value: Any, values: dict[str, Hashable], seen: dict[int, Any], depth: int) -> None:
        if isinstance(value, _PLAIN):
            values[place] = type(value), repr(value)
        elif isinstance(value, np.ndarray | np.generic):
            values[place] = value.dtype.str, value.shape, value.tobytes()
        elif isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                values[place] = id(value), value._version
        elif isinstance(value, FunctionType | Enum) or self._is_other_module(value):
            values[place] = id(value)
        elif depth and id(value) not in seen:
            seen[id(value)] = value
            if (held := held_by(value)) is not None:
                values[place] = len(held)
            for name, part in self._parts(place, value):
                self._walk(name, part, values, seen, depth - 1)

    def _parts(self, place: str, value: Any) -> Iterator[tuple[str, Any]]:
        """What the code may read of ``value``: items of a container, attributes that it names."""
        held = held_by(value)
        if held is not None:
            pairs = held if isinstance(value, Mapping) else [*enumerate(held)]
            for key, part in pairs[:_LARGEST]:
                yield f"{place}[{key if isinstance(key, _PLAIN) else type(key).__name__!r}]", part
        elif isinstance(value, MethodType):
            yield from ((place, value.__func__), (place, value.__self__))
        elif isinstance(value, partial):
            yield from ((place, argument) for argument in (value.func, value.args, value.keywords))
        elif not isinstance(value, FunctionType | torch.Tensor) and not self._is_other_module(value):
            yield from ((f"{place}.{name}", part) for name, part in self._attributes(value).items())

    def _is_other_module(self, value: Any) -> bool:
        """Whether it is a module without code of the script in the model, of which only the identity counts."""
        return isinstance(value, nn.Module) and id(value) not in self._ids

    def _attributes(self, value: Any) -> dict[str, Any]:
        if isinstance(value, ModuleType | type):
            own = vars(value) if self._is_own(value) else {}
            return {name: own[name] for name in sorted(self._names & own.keys())}
        own = {name: entry for name, entry in getattr(value, "__dict__", {}).items() if name not in OF_EVERY_MODULE}
        of_classes = [vars(base) for base in reversed(type(value).__mro__) if self._is_own(base)]
        named = {name: space[name] for space in (*of_classes, own) for name in sorted(self._names & space.keys())}
        if self._calls_library(value):
            named |= {name: entry for name, entry in own.items() if _is_plain(entry)}
        return named

    def _calls_library(self, value: Any) -> bool:
        """Whether the code names a method of ``value`` that a library defines, which may read any of its attributes."""
        if isinstance(value, nn.Module) or id(value) in self._ids:
            return False
        kinds = [vars(base) for base in type(value).__mro__ if base is not object and not self._is_own(base)]
        return any(callable(kind[name]) for kind in kinds for name in self._names & kind.keys())


def changed(before: Mapping[str, Hashable], now: Mapping[str, Hashable]) -> str:
    """The place of a value that is another one ``now`` than ``before``; empty if there is none."""
    places = [place for place in {**before, **now} if before.get(place, _ABSENT) != now.get(place, _ABSENT)]
    return min(places, default="")


def _is_installed(value: Any) -> bool:
    return "-packages" in (getattr(sys.modules.get(module_of(value)), "__file__", None) or "")


def _is_plain(value: Any) -> bool:
    held = held_by(value)
    return isinstance(value, _PLAIN) or (held is not None and all(isinstance(item, _PLAIN) for item in held))
