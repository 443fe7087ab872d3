"""Plain tensors that modules keep as attributes: ``self.scale = torch.tensor(2.0)``, also in lists and dicts."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn


def attribute_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Path -> tensor, each tensor once, for what is neither a parameter nor a buffer: ``layer.masks.0``."""
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _OF_MODULE:
                continue
            for path, tensor in _tensors_in(value, f"{prefix}.{name}" if prefix else name):
                if id(tensor) not in held:
                    held.add(id(tensor))
                    found[path] = tensor
    return found


_OF_MODULE = vars(nn.Module()).keys()  # where nn.Module itself keeps parameters, buffers, modules and hooks


def _tensors_in(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors_in(each, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _tensors_in(each, f"{path}.{index}")
