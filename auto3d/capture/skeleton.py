"""Build a module without memory for its tensors, with seeded random numbers for its code."""

import random
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from auto3d.capture.errors import error_line
from auto3d.capture.foreign import SET_DATA, ForeignWeights, LostValueError
from auto3d.capture.held import map_held
from auto3d.errors import InputError

_INITIALISATIONS = (nn.init.normal_, nn.init.uniform_, nn.init.constant_, nn.init.kaiming_uniform_)
_AT_ONCE_BYTES = 2**30  # weights that a module can read back while it is built for real


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A module whose tensors are on the meta device: shapes and names, no values."""

    model: nn.Module
    registered: tuple[str | None, ...]
    """First name of each registered parameter, in order; None for a parameter that is no longer in the module."""


def skeleton(build: Callable[[], nn.Module], *, seed: int = 0) -> Skeleton:
    """The module that ``build`` makes, without memory.

    If its code needs values, such as values of numpy arrays or of weights that it has just initialised, the module is
    built for real, with memory for the most recently used 1 GiB of parameters. Raises LostValueError if its code reads
    other parameters back.
    """
    try:
        return _on_meta(build, seed)
    except InputError:
        raise
    except Exception:  # the meta device has no values, and each way to read one raises another error
        return _for_real(build, seed)


def _on_meta(build: Callable[[], nn.Module], seed: int) -> Skeleton:
    registered: list[nn.Parameter] = []
    moved = _Moved()

    # A hook may return another tensor to register instead, which torch's annotation of these hooks leaves out.
    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        on_meta: Any = moved(parameter)
        if on_meta is not None:
            registered.append(on_meta)
        return on_meta

    def register_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> Any:
        return moved(buffer)

    with (
        seeded(seed),
        register_module_parameter_registration_hook(register),
        register_module_buffer_registration_hook(register_buffer),
        _MetaData(),
        torch.device("meta"),
    ):
        model = build()
    return Skeleton(model=model, registered=_names(model, registered))


def _for_real(build: Callable[[], nn.Module], seed: int) -> Skeleton:
    registered: list[nn.Parameter] = []
    foreign = ForeignWeights(at_least_bytes=_AT_ONCE_BYTES)

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            registered.append(parameter)
            foreign.register(parameter, f"{type(module).__name__}.{name}")

    try:
        with seeded(seed), register_module_parameter_registration_hook(register), foreign.following():
            model = build()
    except LostValueError as error:
        raise LostValueError(f"{error}{error_line(error)}") from None
    names = _names(model, registered)
    moved = _Moved()
    map_held(model, lambda _, tensor: tensor, moved)
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            setattr(module, name, moved(tensor))
    foreign.release_all()
    return Skeleton(model=model, registered=names)


def _names(model: nn.Module, registered: list[nn.Parameter]) -> tuple[str | None, ...]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return tuple(name_of.get(id(parameter)) for parameter in registered)


class _Moved:
    """Makes one meta tensor for each tensor; tensors that share memory still do so on the meta device."""

    def __init__(self) -> None:
        self._moved = WeakIdKeyDictionary()
        # Storage -> its meta storage; the weak reference keeps the key unique.
        self._storages: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}

    @torch.no_grad()
    def __call__(self, tensor: torch.Tensor | None) -> Any:
        if tensor is None or tensor.is_meta:
            return tensor
        if tensor not in self._moved:
            meta = torch.empty(0, dtype=tensor.dtype, device="meta")
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = (StorageWeakRef(storage), meta.untyped_storage())
            meta.set_(self._storages[storage._cdata][1], tensor.storage_offset(), tensor.size(), tensor.stride())
            if isinstance(tensor, nn.Parameter):
                meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
            keep_gradient_hooks(tensor, meta)
            self._moved[tensor] = meta
        return self._moved[tensor]


def keep_gradient_hooks(tensor: torch.Tensor, stand_in: torch.Tensor) -> None:
    """Give ``stand_in`` the gradient hooks of ``tensor``, which a capture refuses."""
    stand_in._backward_hooks = tensor._backward_hooks
    stand_in._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch, numpy and Python's random inside, and restore the caller's random states at the end."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        seed_all(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def seed_all(seed: int) -> None:
    """Seed torch, numpy and Python's random, from which the code that builds a model draws."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class _MetaData(TorchFunctionMode):
    """Lets code on the meta device assign a real tensor to the ``.data`` of a parameter.

    It leaves out the initialisation of a tensor without values if an equal tensor was accepted before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._accepted: set[Hashable] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func == SET_DATA and args[0].is_meta and not args[1].is_meta:
            args = (args[0], args[1].to("meta"))
        if func not in _INITIALISATIONS or not (tensor := kwargs["tensor"]).is_meta:
            return func(*args, **kwargs)
        options = tuple((name, value) for name, value in kwargs.items() if name != "tensor")
        key = func, tensor.shape, tensor.dtype, tensor.requires_grad, options
        if key not in self._accepted:
            func(*args, **kwargs)
            self._accepted.add(key)
        return tensor
