"""Tensors that a module holds in attributes, lists, tuples and dicts instead of registering them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from auto3d.capture.block_state import OF_EVERY_MODULE


def held_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Place -> tensor, for tensors in attributes of a module or its submodules that are neither parameters nor buffers.

    ``decoder.scale`` is the place of an attribute, ``decoder.slopes.0`` of the first entry of a list. Tensors that
    autograd computed, such as the weight of an old-style weight norm, are left out, since forward computes them again.
    """
    held: dict[str, torch.Tensor] = {}
    map_held(module, lambda place, tensor: held.setdefault(place, tensor))
    return held


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a capture treats as buffers: the module's buffers and its ``held_tensors``."""
    return {**held_tensors(module), **dict(module.named_buffers())}


def moved(module: nn.Module, device: torch.device) -> nn.Module:
    """``module`` moved to ``device`` together with its ``held_tensors``, which ``module.to`` does not move."""
    map_held(module, lambda _, tensor: tensor.to(device))
    return module.to(device)


def map_held(
    module: nn.Module,
    replace: Callable[[str, torch.Tensor], torch.Tensor],
    parameter: Callable[[nn.Parameter], torch.Tensor] = lambda parameter: parameter,
) -> None:
    """Replace each of the module's ``held_tensors`` by ``replace(place, tensor)``.

    A parameter in an attribute, a list, a tuple or a dict, beside the module that registered it, is replaced there by
    ``parameter(it)``.
    """

    def mapped(place: str, value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return parameter(value)
        if isinstance(value, torch.Tensor):
            return value if value.grad_fn is not None else replace(place, value)
        if type(value) is tuple:
            return tuple(mapped(f"{place}.{index}", entry) for index, entry in enumerate(value))
        if isinstance(value, dict | list):
            for key, entry in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if isinstance(entry, torch.Tensor | dict | list | tuple):
                    value[key] = mapped(f"{place}.{key}", entry)
        return value

    for prefix, owner in module.named_modules():
        for name, value in list(vars(owner).items()):
            if name not in OF_EVERY_MODULE and isinstance(value, torch.Tensor | dict | list | tuple):
                owner.__dict__[name] = mapped(f"{prefix}.{name}" if prefix else name, value)


@contextmanager
def parameters_in_containers(module: nn.Module) -> Iterator[None]:
    """Trace ``module`` with its parameters of the trace also where an attribute, a list, a tuple or a dict has them.

    torch.export replaces a parameter only in the module that registered it, and would take the others for constants.
    """
    kind = type(module)
    forward = kind.forward
    owners = {
        id(parameter): (owner, name)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    }

    @wraps(forward)
    def with_traced(*args: Any, **kwargs: Any) -> Any:
        before: dict[int, torch.Tensor] = {}  # stays empty in a part of the model that is of its class

        def traced(parameter: torch.Tensor) -> torch.Tensor:
            if id(parameter) not in owners:
                return parameter
            owner, name = owners[id(parameter)]
            of_trace: torch.Tensor = getattr(owner, name)
            before[id(of_trace)] = parameter
            return of_trace

        def as_before(tensor: torch.Tensor) -> torch.Tensor:
            return before.get(id(tensor), tensor)

        map_held(module, lambda _, tensor: tensor, traced)
        try:
            return forward(*args, **kwargs)
        finally:
            map_held(module, lambda _, tensor: as_before(tensor), as_before)

    with patch.object(kind, "forward", with_traced):
        yield
