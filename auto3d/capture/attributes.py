"""Plain tensors that modules keep as attributes: ``self.scale = torch.tensor(2.0)``, also in lists and dicts."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def attribute_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Path -> tensor, each tensor once, for what is neither a parameter nor a buffer: ``layer.masks.0``."""
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name, value in _attributes(module).items():
            for path, tensor in _tensors_in(value, f"{prefix}.{name}" if prefix else name):
                if id(tensor) not in held:
                    held.add(id(tensor))
                    found[path] = tensor
    return found


def replace_attributes(model: nn.Module, by: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put ``by(tensor)`` in the place of each tensor that a module keeps as an attribute."""
    for module in model.modules():
        for name, value in _attributes(module).items():
            vars(module)[name] = _replaced(value, by)


_OF_MODULE = vars(nn.Module()).keys()  # where nn.Module itself keeps parameters, buffers, modules and hooks


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULE}


def _tensors_in(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors_in(each, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _tensors_in(each, f"{path}.{index}")


def _replaced(value: Any, by: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return by(value)
    if type(value) is dict:  # other kinds know how to be made only by themselves
        value.update({key: _replaced(each, by) for key, each in value.items()})
    elif type(value) is list:
        value[:] = [_replaced(each, by) for each in value]
    elif type(value) is tuple:
        return tuple(_replaced(each, by) for each in value)
    return value
