"""Which code of a script may look at its model while that trains: read off what the code names and reaches."""

import dis
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from inspect import CO_VARARGS, CO_VARKEYWORDS, unwrap
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from auto3d.capture.python_state import is_empty
from auto3d.errors import InputError

OF_MODEL = frozenset({"model", "trainer"})  # names by which a script has the model
_LIBRARIES = {*sys.stdlib_module_names, "accelerate", "auto3d", "datasets", "numpy", "torch", "transformers"}
_BEFORE_STEPS = (
    *("__init__", "compute_loss", "get_decay_parameter_names", "_get_train_sampler", "get_train_dataloader"),
)
"""Methods of a Trainer's subclass that do not run between steps, or not with the weights of then."""


def may_look(value: Any, words: Iterable[str] = OF_MODEL) -> bool:
    """Whether the code of ``value``, a function, a class or an object of one, may look at a model.

    It does if it names one of ``words``, hands on what it is called with by name, or reaches a module.
    """
    names = frozenset(words)
    for reader in functions_of(value):
        if not names.isdisjoint(_words(reader.__code__)) or _hands_on(reader.__code__):
            return True
    return bool(reached(value))


def words_of(value: Any) -> set[str]:
    """The names and the texts in the script's code of ``value``."""
    return {word for reader in functions_of(value) for word in _words(reader.__code__)}


def reached(value: Any) -> set[nn.Module]:
    """The modules that the code of ``value`` reaches: by its attributes, the global names and the enclosed variables
    that it names."""
    modules: set[nn.Module] = set()
    for reader in functions_of(value):
        modules |= {enclosed for _, enclosed in variables_of(reader) if isinstance(enclosed, nn.Module)}
    words = words_of(value)
    for name, held in getattr(value, "__dict__", {}).items():
        if isinstance(held, nn.Module) and name in words:
            modules.add(held)
    return modules


def is_of_user(value: Any) -> bool:
    """Whether a class, a function or a Python module is a script's, or of a library that may know its model."""
    return package_of(value) not in _LIBRARIES


def own_methods(kind: type) -> list[Any]:
    """What classes of the script add to ``kind``, a Trainer, and what runs between steps."""
    return [
        value
        for base in kind.__mro__
        for name, value in vars(base).items()
        if is_of_user(base) and name not in _BEFORE_STEPS
    ]


def check_names_none(kept: set[str], readers: Iterable[Any]) -> None:
    """Raise InputError if code of ``readers`` names one of ``kept``, the attributes that a model's forward sets."""
    for reader in readers if kept else ():
        for name in sorted(kept & words_of(reader)):
            who = getattr(reader, "__name__", type(reader).__name__)
            raise InputError(
                f"Trainer: {who} names {name}, an attribute that the model's forward sets: that runs in the stages "
                "of the pipeline, and a script does not see it; return it from the forward, as an output"
            )


def package_of(value: Any) -> str:
    """The first part of ``module_of(value)``."""
    return module_of(value).partition(".")[0]


def module_of(value: Any) -> str:
    """The name of the Python module that is ``value`` or defines it; empty if it has none."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return name if isinstance(name, str) else ""


def functions_of(value: Any) -> list[FunctionType]:
    """The script's own functions that run where ``value`` is called or its methods are."""
    functions: list[FunctionType] = []
    waiting, seen = [value], set[int]()
    while waiting:
        code = waiting.pop()
        if id(code) in seen:
            continue
        seen.add(id(code))
        if isinstance(code, MethodType):
            waiting += [code.__func__, code.__self__]
        elif isinstance(code, FunctionType):
            function = unwrap(code)
            if isinstance(function, FunctionType) and is_of_user(function):
                functions.append(function)
                waiting += [part for _, part in variables_of(function) if isinstance(part, FunctionType | type)]
        elif isinstance(code, staticmethod | classmethod):
            waiting.append(code.__func__)
        elif isinstance(code, property):
            waiting.append(code.fget)
        elif isinstance(code, partial):
            waiting += [code.func, *code.args, *code.keywords.values()]
        elif not isinstance(code, nn.Module):
            kind = code if isinstance(code, type) else type(code)
            waiting += [method for base in kind.__mro__ if base is not object for method in _methods(base)]
    return functions


def _methods(kind: type) -> Iterator[Callable[..., Any]]:
    for value in vars(kind).values():
        if isinstance(value, FunctionType | staticmethod | classmethod | property):
            yield value  # type: ignore[misc]  # a property's function counts too


def variables_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """(name, value) of the global names and the enclosed variables that ``function`` names."""
    values = function.__globals__
    yield from ((name, values[name]) for name in sorted(names_in(function.__code__) & values.keys()))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if not is_empty(cell):  # it is assigned already
            yield name, cell.cell_contents


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def names_in(code: CodeType) -> set[str]:
    """The global names and the attributes in ``code``."""
    return {name for part in _codes(code) for name in part.co_names}


def _words(code: CodeType) -> set[str]:
    """The names and the texts in ``code``."""
    texts = {const for part in _codes(code) for const in part.co_consts if isinstance(const, str)}
    return texts | {name for part in _codes(code) for name in (*part.co_varnames, *part.co_names)}


def _hands_on(code: CodeType) -> bool:
    """Whether ``code`` uses its keyword arguments as a whole."""
    if not code.co_flags & CO_VARKEYWORDS:
        return False
    name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)]
    return any(step.opname.startswith("LOAD") and step.argval == name for step in dis.get_instructions(code))
