"""The generators from which a script's dataset and collator draw, and their states.

They are the generators of Python, numpy and torch, which all code shares, and a script's own: objects that a dataset or
a collator keeps, in whatever it holds, or that its code names.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from auto3d.capture.python_state import held_by
from auto3d.data.drawing import drawing
from auto3d.trainer.looks import functions_of, is_of_user, variables_of

LOCK = RLock()
"""Held while samples are read: a thread reads ahead, and all share the generators of the process."""

_PLAIN = (
    *(bool, int, float, complex, str, bytes, bytearray, type(None)),
    *(np.ndarray, np.generic, torch.Tensor, ModuleType),
)
_KINDS = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
_DEEPEST = 8  # most attributes and containers on the way to a generator
_LARGEST = 100  # items of a container that are looked at
_MOST = 5000  # objects that are looked at
_SHARED = (random._inst, np.random.mtrand._rand, torch.default_generator)

Place = tuple[str, int | None]
"""How a script's own generator is reached, as in ``data_collator.generator``, and its identity in this process.

The identity is None where a process has sent or written the state."""


@dataclass(frozen=True)
class States:
    """The states of all generators at one moment."""

    python: Any
    numpy: Any
    torch: Any
    own: Mapping[Place, Any] = field(default_factory=dict)  # a state of None: the generator is not made yet

    def to_json(self) -> str:
        """The states, by names that hold in other processes."""
        own = {path: state for (path, _), state in self.own.items()}
        return json.dumps([self.python, self.numpy, self.torch, own], default=lambda array: array.tolist())

    @classmethod
    def from_json(cls, text: str) -> "States":
        python, of_numpy, of_torch, own = json.loads(text)
        return cls(python, of_numpy, of_torch, {(path, None): state for path, state in own.items()})


@dataclass
class _Slot:
    """Where a generator is, or will be once ``holder`` has made it: its attribute ``name``; None: nothing else can be
    there."""

    path: str
    holder: Any
    name: str
    last: Any  # the generator that was found there last
    is_awaited: bool = False  # whether the first call makes it

    @property
    def place(self) -> Place:
        return self.path, id(self.holder if self.is_awaited else self.now())

    def now(self) -> Any:
        return self.last if self.holder is None else vars(self.holder).get(self.name)

    def state(self) -> Any:
        """The state of the generator; None if it is not there."""
        generator = self.now()
        if not isinstance(generator, _KINDS):
            return None
        self.last = generator
        return _state_of(generator)

    def set(self, state: Any) -> None:
        if self.holder is not None and isinstance(self.now(), _KINDS | None):
            vars(self.holder)[self.name] = None if state is None else self.last
        if state is not None:
            _set_state(self.last, state)

    def seed(self, number: int) -> None:
        """Let the generator, of which something was drawn before, draw as ``number`` says."""
        generator = self.last
        if self.holder is not None:
            vars(self.holder)[self.name] = generator
        if isinstance(generator, torch.Generator):
            generator.manual_seed(number)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(number).state
        else:
            generator.seed(number)


class Generators:
    """The generators of Python, numpy and torch, and a script's own that ``holders`` reach, by their names.

    A thread may read ahead, which shares all of them with the others, so whoever draws holds ``lock``.
    """

    def __init__(self, lock: AbstractContextManager[Any] = LOCK, **holders: Any) -> None:
        self._lock = lock
        self._own: list[_Slot] = []
        self._awaited: list[_Slot] = []  # attributes that are None, where the first call may put a generator
        seen: dict[int, Any] = {id(generator): generator for generator in _SHARED}
        for name, holder in holders.items():
            self._walk(_Slot(name, None, "", holder), seen, _DEEPEST)

    def states(self, others: States | None = None) -> States:
        """The states now; ``others`` has the states of generators that are not among these."""
        own = dict(others.own) if others is not None else {}
        for slot in self._own:
            own.pop((slot.path, None), None)
            own[slot.place] = slot.state()
        return States(random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state(), own)

    def set(self, states: States) -> None:
        """Let the generators go on from ``states``; an own one that these lack stays as it is."""
        _set_pythons(random, states.python)
        np.random.set_state(states.numpy)
        torch.default_generator.set_state(torch.as_tensor(states.torch, dtype=torch.uint8))
        for slot in self._own:
            for place in (slot.place, (slot.path, None)):
                if place in states.own:
                    slot.set(states.own[place])
                    break

    @contextmanager
    def at(self, states: States) -> Iterator[None]:
        """Inside, code draws from ``states`` on; then the generators are as before."""
        with self._lock, drawing(), self._kept():
            self.set(states)
            yield

    @contextmanager
    def seeded(self) -> Iterator[Callable[..., None]]:
        """Inside, code draws as the whole numbers say with which what this gives is called; then all are as before."""
        with self._lock, drawing() as begin, self._kept():

            def begin_all(*seed: int) -> None:
                number = begin(*seed)
                for slot in self._own:
                    slot.seed(number)

            yield begin_all

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Have a script's own generators as before at the end."""
        before = [(slot, slot.state()) for slot in self._own]
        try:
            yield
        finally:
            for slot, state in before:
                slot.set(state)
            for slot in self._awaited:
                if isinstance(slot.now(), _KINDS):
                    slot.is_awaited = True
                    slot.state()  # it notes the generator
                    slot.set(None)
                    self._own.append(slot)
            self._awaited = []

    def _walk(self, slot: _Slot, seen: dict[int, Any], depth: int) -> None:
        value = slot.now()
        if value is None and slot.holder is not None:
            self._awaited.append(slot)
        if isinstance(value, _PLAIN) or id(value) in seen or not depth or len(seen) > _MOST:
            return
        seen[id(value)] = value
        if isinstance(value, _KINDS):
            if not isinstance(value, random.SystemRandom):
                self._own.append(slot)
            return
        for part in _parts(slot.path, value):
            self._walk(part, seen, depth - 1)


def _parts(path: str, value: Any) -> Iterator[_Slot]:
    """What ``value`` holds, or what its code names."""
    held = held_by(value)
    if held is not None:
        pairs = held if isinstance(value, Mapping) else [*enumerate(held)]
        for key, part in pairs[:_LARGEST]:
            yield _Slot(f"{path}[{key!r}]" if isinstance(key, str | int) else path, None, "", part)
        return
    if isinstance(value, MethodType):
        yield _Slot(path, None, "", value.__self__)
    if isinstance(value, partial):
        yield from (_Slot(path, None, "", part) for part in (value.func, value.args, value.keywords))
    if isinstance(value, FunctionType | MethodType | type) or is_of_user(type(value)):
        for function in functions_of(value):
            for name, part in variables_of(function):
                yield _Slot(f"{path}: {name}", None, "", part)
    if isinstance(value, FunctionType | MethodType | type):
        return
    for base in type(value).__mro__:
        for name, part in vars(base).items() if is_of_user(base) else ():
            if isinstance(part, _KINDS):
                yield _Slot(f"{path}.{name}", None, "", part)
    for name, part in [*getattr(value, "__dict__", {}).items()]:
        yield _Slot(f"{path}.{name}", value, name, part)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False) if isinstance(generator, np.random.RandomState) else generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.as_tensor(state, dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        _set_pythons(generator, state)


def _set_pythons(generator: Any, state: Any) -> None:
    version, numbers, gauss = state
    generator.setstate((version, tuple(numbers), gauss))


PROCESS = Generators()
"""The generators of Python, numpy and torch alone."""
